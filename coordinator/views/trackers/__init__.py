"""Trackers: write the figures of a run's rounds to other tools."""
