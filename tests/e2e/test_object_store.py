"""A federation whose blobs go through an S3 server."""

from pathlib import Path

import pytest

from coordinator.rounds.status import read_status
from fedvit.wire.messages import BlobPut, BlobUrl, SumMasked
from tests.support.programs import DEVICES, SUMMED, Stage, wait_for
from tests.support.s3_server import BUCKET, KEYS
from tests.support.stores import s3_server


@pytest.mark.slow
def test_run_through_a_store_that_is_down_at_first_has_the_same_tensors(
    stage: Stage, undisturbed: bytes, tmp_path: Path
) -> None:
    """Nothing may go over MQTT instead: blobs wait for the store, and no URL or key is left in a file."""
    stage.environment |= KEYS
    with s3_server(tmp_path) as server:
        server.kill()
        given = ["--blobs.url", f"s3://{BUCKET}/fleet", "--blobs.endpoint", server.endpoint]
        coordinator = stage.coordinator(*given, "--blobs.min-bytes", "1000", "--blobs.fallback-bytes", "0")
        observer = stage.observer()
        devices = {name: stage.device(name) for name in DEVICES}
        wait_for(lambda: "larger ones wait for it" in stage.log("coordinator"), "the coordinator to notice")
        wait_for(lambda: read_status(stage.out / "run").store_trouble, "the status file to say so")
        server.start()
        stage.finish_run(coordinator, devices)
        assert not [name for name in server.objects() if "probe" not in name], "what was put is removed in the end"
    assert stage.model() == undisturbed
    assert not stage.show()["refusals"]
    located = [message for message in observer.messages() if isinstance(message, BlobUrl)]
    assert len({message.digest for message in located}) >= 2, "two graphs at least"
    assert not [topic for topic, _ in observer.drain() if "/b/" in topic], "no chunk went over MQTT"
    secrets = ("X-Amz", *KEYS.values())
    kept = [path for path in (*stage.folder.glob("*.log"), *stage.out.rglob("*")) if path.is_file()]
    assert len(kept) > 10
    for path in kept:
        content = path.read_bytes() if path.name != "s3.log" else b""
        assert not [secret for secret in secrets if secret.encode() in content], path


@pytest.mark.slow
def test_masked_numbers_go_through_the_store(stage: Stage, calm_sums: bytes, tmp_path: Path) -> None:
    """Devices put them, and the coordinator fetches them; no device sends a chunk over MQTT."""
    stage.environment |= KEYS
    with s3_server(tmp_path) as server:
        coordinator = stage.coordinator(
            *["--blobs.url", f"s3://{BUCKET}/fleet", "--blobs.endpoint", server.endpoint],
            *["--blobs.min-bytes", "1000", "--blobs.fallback-bytes", "0"],
            values={**SUMMED, "secure": True, "devices": len(DEVICES)},
        )
        observer = stage.observer()
        stage.finish_run(coordinator, {name: stage.device(name) for name in DEVICES})
        assert not [name for name in server.objects() if "probe" not in name], "what was put is removed in the end"
    assert stage.model() == calm_sums
    messages = observer.messages()
    masked = {message.vector.digest for message in messages if isinstance(message, SumMasked) and not message.inline}
    assert len(masked) == SUMMED["rounds"] * len(DEVICES)
    assert masked <= {message.digest for message in messages if isinstance(message, BlobPut) and message.stored}
    assert not [topic for topic, _ in observer.drain() if "/up/b/" in topic]
