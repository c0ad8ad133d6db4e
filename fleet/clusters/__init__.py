"""Work on a Ray cluster: cells of an experiment, hosts of virtual devices. Ray is imported here alone."""
