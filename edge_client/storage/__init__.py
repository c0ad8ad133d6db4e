"""The files of a device: personal tensors, blobs, and their removal."""
