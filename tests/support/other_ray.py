"""`fleet` on a machine that has another version of Ray than the cluster."""

import fleet.cli


def main() -> None:
    """For `Forked`."""
    import ray  # not above: modules of tests are imported when tests are collected, and Ray reads its environment then

    ray.__version__ = "2.52.0"
    fleet.cli.main()
