"""The HTTP API: what the commands do on a service, as JSON over HTTP, for tokens with roles (docs/api.md)."""
