"""One run while it is served: its state, devices, tasks, rounds."""
