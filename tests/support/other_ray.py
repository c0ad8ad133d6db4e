"""`fleet` on a machine that has another version of Ray than the cluster."""

import ray

import fleet.cli


def main() -> None:
    """For `Forked`."""
    ray.__version__ = "2.52.0"
    fleet.cli.main()
