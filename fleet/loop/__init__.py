"""`fleet demo loop`: two devices learn a class that appears while they are in use, with real processes."""
