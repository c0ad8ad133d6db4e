"""Instruments of the project, in a checkout only: benchmarks, faults, damaged messages, attacks: `python -m bench`."""

import fedvit as fedvit  # what it says to the engine must be said first
