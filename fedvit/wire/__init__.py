"""Messages between devices and coordinator, and the transfer of blobs: pure, no input or output."""
