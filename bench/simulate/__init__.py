"""Simulated federations: rounds per second of fedvit's engines, beside a plain PyTorch loop over clients."""
