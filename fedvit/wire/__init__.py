"""What travels between devices and coordinator, and how a blob is moved: pure, no input or output."""
