"""Writes the figures of a run's rounds, read from the record, to other tools.

Every writer is a module here, and a row of `writers.WRITERS`.
"""
