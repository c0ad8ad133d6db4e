"""Everything that an operator does with a service, as functions: the commands and the dashboard call the same ones."""
