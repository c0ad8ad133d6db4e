"""The commands of `coordinator`: parse flags, and print."""
