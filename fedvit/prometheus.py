"""Metrics that a coordinator and a device have in common. Imports prometheus_client, which is optional."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from fedvit.timings import LoopWatch
from fedvit.transport.base import Transport
from fedvit.transport.exchange import BlobExchange


def transport_metrics(link: Transport, loops: Sequence[tuple[str, int, BlobExchange | None]]) -> Iterator[Metric]:
    """The traffic of a link, and of each loop: its name, the events in its inbox, and its transfers."""
    yield CounterMetricFamily("fedvit_sent_bytes", "Payload bytes that were sent since the start.", link.sent_bytes)
    yield CounterMetricFamily(
        "fedvit_received_bytes", "Payload bytes that were received since the start.", link.received_bytes
    )
    yield GaugeMetricFamily(
        "fedvit_send_queue_bytes", "Bytes that are queued in this process for the broker.", link.pending_bytes()
    )
    events = GaugeMetricFamily("fedvit_inbox_events", "Events that wait in the inbox of a loop.", labels=["loop"])
    transfers = GaugeMetricFamily("fedvit_transfers", "Blobs that are being transferred.", labels=["loop", "direction"])
    for name, waiting, exchange in loops:
        events.add_metric([name], waiting)
        if exchange:
            receiving, sending = exchange.under_way()
            transfers.add_metric([name, "in"], receiving)
            transfers.add_metric([name, "out"], sending)
    yield events
    yield transfers


def loop_metrics(loops: Mapping[str, LoopWatch]) -> Iterator[Metric]:
    """By how much the turns of loops are delayed, by the name of the loop."""
    delays = SummaryMetricFamily(
        "fedvit_loop_delay_seconds", "By how much longer than its usual wait a turn of a loop took.", labels=["loop"]
    )
    longest = GaugeMetricFamily(
        "fedvit_loop_longest_delay_seconds", "Longest delay of the last one to two minutes.", labels=["loop"]
    )
    for name, loop in loops.items():
        delays.add_metric([name], loop.delays.count, loop.delays.total_s)
        longest.add_metric([name], loop.delays.longest_s())
    yield delays
    yield longest
