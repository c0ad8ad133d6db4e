"""Benchmarks: `python -m bench`, in a checkout only."""

import fedvit as fedvit  # sets the engine's environment, so it must be imported before the engine
