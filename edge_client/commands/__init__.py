"""The commands of `edge-client`."""
