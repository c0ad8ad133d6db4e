"""A speed as the tests of the device need it: its figures do not matter."""

from fedvit.resources import ProductRate, Speed


def some_speed(threads: int = 1, flops_per_s: float = 2.5e10) -> Speed:
    return Speed(
        threads=threads,
        products=(ProductRate(64, 192, 768, flops_per_s),),
        stream_bytes_per_s=2.5e9,
        cached_bytes_per_s=1e10,
        cache_bytes=2**20,
        elements_per_s={"Exp": 5e8},
        node_s=2e-6,
    )
