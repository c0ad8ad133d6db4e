"""Everything that an operator does with a service, as functions: the commands and the HTTP API call the same ones."""
