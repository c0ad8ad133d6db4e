"""A device's folder of images or text."""
