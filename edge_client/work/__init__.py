"""The work of a task: graphs, batches, and the result."""
