"""Checks that the device makes without trusting the coordinator."""
