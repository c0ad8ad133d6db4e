"""Generators: the server's functions from a device's embedding to tensors made for that device."""
