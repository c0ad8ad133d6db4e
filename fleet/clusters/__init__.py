"""Cells of an experiment and hosts of virtual devices on a Ray cluster. Only this package imports Ray."""
