"""Simulated federations: rounds per second of fedvit's engines, compared with a plain PyTorch loop over clients."""
