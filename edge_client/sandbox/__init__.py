"""Runs graphs in a process of their own, without network, keys and more memory than the budget."""
