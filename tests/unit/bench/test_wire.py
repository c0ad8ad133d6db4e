"""The ways that are compared move real bytes between real processes; here small ones."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from bench.machine import this_machine
from bench.wire import BrokerReport, Echo, Kill, Speeds, StoreSpeeds, WireReport, _Bench, run_wire_bench, wire_table
from fedvit.errors import ConfigError
from tests.support.stores import s3_server, set_keys

BLOB_BYTES = 1_000_000


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Bench]:
    made = _Bench("mosquitto", tmp_path_factory.mktemp("bench"), BLOB_BYTES)
    yield made
    made.stop()


def test_ours_is_measured_with_what_was_sent(bench: _Bench) -> None:
    """Two receivers of one topic are sent the blob once: eight headers of 64 bytes and some control beside it."""
    rate, seen = bench.rate("ours", 2)
    assert rate > 0
    assert BLOB_BYTES < seen["sent"] < 1.1 * BLOB_BYTES


@pytest.mark.parametrize("way", ["tcp", "pickle"])
def test_other_transports_send_the_same_bytes(bench: _Bench, way: str) -> None:
    """Each receiver checks the size itself, and fails when it is another."""
    rate, _ = bench.rate(way, 2)
    assert rate > 0


def test_object_store_is_compared_with_a_plain_get(
    bench: _Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch)
    with s3_server(tmp_path) as server:
        rates = bench.store_rates(server)
        assert rates["s3"] > 0
        assert rates["get"] > 0
        assert len(server.objects()) == 2, "of the same size, beside the first small one"


def test_run_without_grpc_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)  # as if it were not installed
    lines: list[str] = []
    with pytest.raises(ConfigError, match=r"grpcio, which is not installed: pip install 'grpcio>=1\.60'"):
        run_wire_bench(["mosquitto"], progress=lines.append)
    assert lines == []


def test_the_table_shows_what_was_not_measured_as_nothing() -> None:
    speeds = Speeds(
        receivers=1, ours_mb_s=50.0, tcp_mb_s=200.0, grpc_mb_s=100.0, pickle_mb_s=None, json_mb_s=None,
        ours_over_tcp=0.25, ours_over_grpc=0.5, ours_over_pickle=None, ours_over_json=None, broker_peak_bytes=4_000_000,
        sender_peak_bytes=0, receiver_peak_bytes=0, sent_over_size=1.001, runs={"ours": (50.0,)},
    )  # fmt: skip
    kill = Kill(size=250_000_000, completed=True, digest_right=True, sent_over_size=1.03, took_s=2.0)
    broker = BrokerReport(kind="a broker", k1=speeds, k4=speeds, kill=kill, echo=Echo(bytes=2048, p50_ms=0.5, p99_ms=1))
    report = WireReport(
        machine=this_machine(),
        blob_bytes=64,
        rounds=1,
        stores_in="/dev/shm",
        brokers={"mosquitto": broker},
        store=StoreSpeeds(s3_mb_s=450.0, get_mb_s=500.0, s3_over_get=0.9, runs={}),
    )
    console = Console(width=200, record=True)
    console.print(wire_table(report))
    text = console.export_text()
    assert "0.25" in text
    assert "a plain GET 500 MB/s, ratio 0.90" in text
    assert "None" not in text
    assert "completed, sent 1.030 x" in text
