"""Processes of `coordinator start` and `serve`: from the options of the command to the end of the last run."""
