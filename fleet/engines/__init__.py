"""A simulation's torch engine: computes the devices of a cohort in one batch, for experiments at the papers' scale."""
