"""A speed as the tests of the device need it: its figures do not matter."""

from fedvit.resources import ProductRate, Speed


def some_speed(threads: int = 1, flops_per_s: float = 2.5e10) -> Speed:
    return Speed(
        threads=threads,
        products=(ProductRate("weights", 1, 64, 192, 768, flops_per_s),),
        bytes_per_s={"Add": 2.5e9},
        node_s=2e-6,
    )
