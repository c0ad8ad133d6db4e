"""The record of runs: the database, its copies, the read model, and retention."""
