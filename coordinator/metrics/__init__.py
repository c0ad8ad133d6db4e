"""The figures of a run's rounds in the files and services of other tools, read from the record.

A writer is a file here, and a row of `writers.WRITERS`.
"""
