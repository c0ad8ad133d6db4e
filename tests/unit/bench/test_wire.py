"""The ways that are compared move real bytes between real processes; here small ones."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.wire import _Bench, run_wire_bench
from fedvit.errors import ConfigError
from tests.support.codes import has_code
from tests.support.stores import s3_server, set_keys

BLOB_BYTES = 1_000_000


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Bench]:
    made = _Bench("mosquitto", tmp_path_factory.mktemp("bench"), BLOB_BYTES)
    yield made
    made.stop()


def test_ours_is_measured_with_what_was_sent(bench: _Bench) -> None:
    """Two receivers of one topic are sent the blob once: eight headers of 64 bytes and some control beside it."""
    rate, seen = bench.measure_rate("ours", 2)
    assert rate > 0
    assert BLOB_BYTES < seen["sent"] < 1.1 * BLOB_BYTES


@pytest.mark.parametrize("way", ["tcp", "pickle"])
def test_other_transports_send_the_same_bytes(bench: _Bench, way: str) -> None:
    """Each receiver checks the size itself, and fails when it is another."""
    rate, _ = bench.measure_rate(way, 2)
    assert rate > 0


def test_object_store_is_compared_with_a_plain_get(
    bench: _Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys(monkeypatch)
    with s3_server(tmp_path) as server:
        rates = bench.measure_store(server)
        assert rates["s3"] > 0
        assert rates["get"] > 0
        assert len(server.objects()) == 2, "of the same size, beside the first small one"


def test_run_without_grpc_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)  # as if it were not installed
    lines: list[str] = []
    with pytest.raises(ConfigError, check=has_code("FV0002")):
        run_wire_bench(["mosquitto"], progress=lines.append)
    assert lines == []
