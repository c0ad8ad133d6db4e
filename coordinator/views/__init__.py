"""Views of runs: pages, tables, trackers and metrics."""
