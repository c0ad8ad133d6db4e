"""The commands of `coordinator`: what flags say, and what is printed."""
