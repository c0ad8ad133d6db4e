"""Server rules: what the server does with a round's uploads. Each exists once, shared by all methods."""
