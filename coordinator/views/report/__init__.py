"""The report of a run: its data, its page and its words."""
