"""The owner's page of a device: what it does, what left it, its pictures."""
