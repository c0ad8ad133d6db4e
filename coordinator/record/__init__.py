"""What stays of runs: the database, copies of it, what is read from it, and what is removed."""
