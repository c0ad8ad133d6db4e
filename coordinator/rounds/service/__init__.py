"""The coordinator as a service: one link to a broker, and the runs that share it."""
