"""Known graphs on the device: only fedvit's own and those that the pinned publisher signed are run."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_client.storage.ledger import Ledger
from edge_client.trust import known_graphs
from edge_client.trust.known_graphs import PUBLISHER_FILE, check_known, check_token_publisher, read_publisher
from edge_client.trust.policy import load_policy
from fedvit.errors import ConfigError, NotAllowed
from fedvit.known_graphs import read_own_graphs
from fedvit.policy import Policy, TrainPolicy
from fedvit.program import Program
from fedvit.public_keys import format_key
from fedvit.publisher import PublisherKey
from fedvit.wire.messages import Declined, Task
from tests.support.agents import World
from tests.support.codes import has_code
from tests.support.settings import Setting

TASK = Task("i", 1, "run", 1, "train", 0, "blake3:00", {}, (), 60.0)


@pytest.fixture
def key(tmp_path: Path) -> PublisherKey:
    return PublisherKey.create(tmp_path / "publisher.key")


def sign(key: PublisherKey, program: Program) -> dict[str, Any]:
    """Return the fields of a task whose graphs a publisher signed."""
    return {"publisher": key.public, "signatures": tuple(map(key.sign, program.digests_by_graph().values()))}


def test_signed_graphs_are_known(fedavg: Setting, key: PublisherKey) -> None:
    check_known(msgspec.structs.replace(TASK, **sign(key, fedavg.program)), fedavg.program, key.public)


def test_unsigned_graphs_are_refused(fedavg: Setting, key: PublisherKey) -> None:
    for publisher, named in ((key.public, f"publisher {key.public} has not signed"), ("", "no trusted publisher")):
        with pytest.raises(NotAllowed, check=has_code("FV1434", named)):
            check_known(TASK, fedavg.program, publisher)


def test_each_graph_needs_its_own_signature(fedavg: Setting, key: PublisherKey) -> None:
    signed = sign(key, fedavg.program)["signatures"]
    assert len(signed) > 1
    for wrong in (signed[:-1], signed[::-1], (*signed[:-1], bytes(64)), (*signed[:-1], b"")):
        task = msgspec.structs.replace(TASK, publisher=key.public, signatures=wrong)
        with pytest.raises(NotAllowed, check=has_code("FV1434")):
            check_known(task, fedavg.program, key.public)


def test_another_publisher_is_refused_with_a_warning(fedavg: Setting, key: PublisherKey, tmp_path: Path) -> None:
    other = PublisherKey.create(tmp_path / "other.key")
    task = msgspec.structs.replace(TASK, **sign(other, fedavg.program))
    with pytest.raises(NotAllowed, check=has_code("FV1435", "THE PUBLISHER HAS CHANGED")) as raised:
        check_known(task, fedavg.program, key.public)
    assert other.public in str(raised.value)
    assert key.public in str(raised.value)
    claimed = msgspec.structs.replace(task, publisher=key.public)
    with pytest.raises(NotAllowed, check=has_code("FV1434")):
        check_known(claimed, fedavg.program, key.public)


def test_own_graphs_need_no_publisher(fedavg: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [graph.digest for graph in fedavg.program.graphs.values()]
    monkeypatch.setattr(known_graphs, "read_own_graphs", lambda: frozenset(digests))
    check_known(TASK, fedavg.program, "")
    monkeypatch.setattr(known_graphs, "read_own_graphs", lambda: frozenset(digests[1:]))
    with pytest.raises(NotAllowed, check=has_code("FV1434")):
        check_known(TASK, fedavg.program, "")


def test_list_of_own_graphs_has_digests_only() -> None:
    assert len(read_own_graphs()) > 500
    assert all(line.startswith("blake3:") and len(line) == 71 for line in read_own_graphs())


def test_memory_of_verified_signatures_is_bounded(
    fedavg: Setting, key: PublisherKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_graphs, "MAX_REMEMBERED", 1)
    task = msgspec.structs.replace(TASK, **sign(key, fedavg.program))
    for _ in range(3):
        check_known(task, fedavg.program, key.public)
    assert len(known_graphs._signed) <= 1


def test_publisher_of_the_state_makes_the_policy_known(tmp_path: Path, key: PublisherKey) -> None:
    assert read_publisher(tmp_path) == ""
    assert not load_policy(tmp_path, None, {}).only_known
    (tmp_path / PUBLISHER_FILE).write_text(f"{key.public}\n")
    policy = load_policy(tmp_path, None, {})
    assert (policy.train.publisher, policy.only_known) == (key.public, True)
    assert not load_policy(tmp_path, None, {"methods": "checked"}).only_known
    other = format_key(bytes(32))
    assert load_policy(tmp_path, None, {"publisher": other}).train.publisher == other
    (tmp_path / PUBLISHER_FILE).write_text("damaged")
    with pytest.raises(ConfigError, check=has_code("FV1436", PUBLISHER_FILE)):
        load_policy(tmp_path, None, {})


def test_token_with_another_publisher_is_refused(tmp_path: Path, key: PublisherKey) -> None:
    other = format_key(bytes(32))
    check_token_publisher(tmp_path, "", replace=False)
    check_token_publisher(tmp_path, other, replace=False)
    (tmp_path / PUBLISHER_FILE).write_text(f"{key.public}\n")
    check_token_publisher(tmp_path, key.public, replace=False)
    check_token_publisher(tmp_path, "", replace=False)
    with pytest.raises(ConfigError, check=has_code("FV1435", "--replace-publisher")):
        check_token_publisher(tmp_path, other, replace=False)
    check_token_publisher(tmp_path, other, replace=True)
    with pytest.raises(ConfigError, check=has_code("FV1436")):
        check_token_publisher(tmp_path, "nobody", replace=True)


def test_device_declines_unknown_graphs_and_does_known_ones(world: World, fedavg: Setting, key: PublisherKey) -> None:
    world.device(policy=Policy(train=TrainPolicy(publisher=key.public)))
    world.give(fedavg)
    declined = world.server.expect(Declined)
    assert "has not signed graph" in declined.reason
    [refused] = [line for line in Ledger(world.state).read() if line.kind == "refused" and line.run == "run"]
    assert refused.reason == declined.reason
    assert world.result(fedavg, round=2, **sign(key, fedavg.program)).upload is not None
