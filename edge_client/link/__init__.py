"""The connection to the coordinator: identity, messages, and answers until they are acknowledged."""
