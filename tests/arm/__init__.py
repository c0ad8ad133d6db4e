"""What `make arm` runs: the device's programs on emulated processors of a Raspberry Pi 4 and 5."""
