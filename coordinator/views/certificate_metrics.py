"""Metrics of the certificates of a deployment."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from coordinator.views.observed import Observed
from fedvit.errors import FedvitError


def read_certificate_metrics(observed: Observed) -> Iterator[Metric]:
    """Read when certificates end; nothing without a deployment, or if its registry cannot be read."""
    try:
        ends = observed.certificates() if observed.certificates else None
    except FedvitError:
        return
    if ends is None:
        return
    left = GaugeMetricFamily(
        "fedvit_certificate_expires_seconds", "Time until a certificate ends.", labels=["certificate"]
    )
    for name, left_s in ends.left_s.items():
        left.add_metric([name], left_s)
    yield left
    yield GaugeMetricFamily(
        "fedvit_devices_certificate_ending",
        "Devices whose certificate ends within 14 days, or has ended.",
        ends.ending_devices,
    )
