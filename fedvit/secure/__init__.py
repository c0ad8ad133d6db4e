"""Secure sums: a coordinator learns the sum of its devices' numbers, and nothing of a single device.

The protocol is SecAgg+ (Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", IACR ePrint
2020/704), with the checks of Bonawitz et al. (arXiv:1611.04482) for a coordinator that lies. This package does no
input or output: `device` and `server` take messages and return messages.
"""

SUM = "(sum)"
"""Stands for a device in the result of a secure sum. No device can have this name."""
