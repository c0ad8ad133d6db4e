"""What a device reads: its folder of images."""
