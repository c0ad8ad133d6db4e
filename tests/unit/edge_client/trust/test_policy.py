"""The owner's policy on the device: where it comes from, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_client.storage.ledger import Ledger
from edge_client.trust.policy import check_policy, check_token_policy, count_upload_bytes, load_policy
from edge_client.work.sampler import SAMPLERS
from fedvit.errors import ConfigError, NotAllowed
from fedvit.policy import Policy, SendPolicy
from fedvit.resources import ResourceUse
from fedvit.wire.messages import Declined, Manifest, Result, Task
from tests.support.agents import World
from tests.support.codes import has_code
from tests.support.settings import Setting

TASK = Task("i", 1, "run", 1, "train", 0, "blake3:00", {}, (), 60.0)


def check(policy: Policy, setting: Setting, ledger: Ledger, **changed: Any) -> None:
    check_policy(policy, setting.program, TASK, ledger=ledger, images=20)


def test_flags_override_the_file_of_the_state(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[send]\nfeatures = "none"\nmin_mask = 0.9\n')
    policy = load_policy(tmp_path, None, {"features": "any", "memory_budget": 5, "updates": None})
    assert (policy.send.features, policy.send.min_mask, policy.train.memory) == ("any", 0.9, 5)
    other = tmp_path / "other.toml"
    other.write_text('[send]\nupdates = "none"\n')
    assert load_policy(tmp_path, other, {}).send == SendPolicy(updates="none")
    assert load_policy(tmp_path / "empty", None, {}) == Policy()


def test_wrong_flag_and_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1431", "--features [send]: features = 'all'")):
        load_policy(tmp_path, None, {"features": "all"})
    with pytest.raises(ConfigError, check=has_code("FV1431", "policy.toml")):
        load_policy(tmp_path, tmp_path / "policy.toml", {})


def test_token_brings_a_policy_to_a_device_without_one(tmp_path: Path) -> None:
    text = '[send]\nupdates = "none"\n'
    check_token_policy(tmp_path, "", replace=False)
    check_token_policy(tmp_path, text, replace=False)
    (tmp_path / "policy.toml").write_text("[send]\n")
    check_token_policy(tmp_path, "[send]\n", replace=False)
    with pytest.raises(ConfigError, check=has_code("FV1433", "--replace-policy")):
        check_token_policy(tmp_path, text, replace=False)
    check_token_policy(tmp_path, text, replace=True)
    with pytest.raises(ConfigError, check=has_code("FV1431", "policy of the token")):
        check_token_policy(tmp_path, "[sned]", replace=True)


@pytest.mark.parametrize(
    ("policy", "name", "key"),
    [
        (Policy(send=SendPolicy(updates="none")), "fedavg", 'updates = "none"'),
        (Policy(send=SendPolicy(updates="sum")), "fedavg", 'updates = "sum"'),
        (Policy(send=SendPolicy(features="none")), "eftvit", 'features = "none"'),
        (Policy(send=SendPolicy(min_mask=0.6)), "eftvit", "min_mask = 0.6"),
        (Policy(send=SendPolicy(max_bytes_per_day=1000)), "fedavg", "max_bytes_per_day"),
    ],
)
def test_a_task_beyond_the_policy_is_refused_with_its_key(
    settings: dict[str, Setting], tmp_path: Path, policy: Policy, name: str, key: str
) -> None:
    with pytest.raises(NotAllowed, check=has_code("FV1432", key)):
        check(policy, settings[name], Ledger(tmp_path))


def test_default_policy_allows_updates_and_masked_features(settings: dict[str, Setting], tmp_path: Path) -> None:
    for setting in settings.values():
        check(Policy(), setting, Ledger(tmp_path))
    check(Policy(send=SendPolicy(updates="none")), settings["eftvit"], Ledger(tmp_path))
    check(Policy(send=SendPolicy(features="none")), settings["fedavg"], Ledger(tmp_path))
    check(Policy(send=SendPolicy(features="any", min_mask=0.9)), settings["eftvit"], Ledger(tmp_path))


def test_bytes_of_a_day_are_counted_from_the_ledger(fedavg: Setting, tmp_path: Path) -> None:
    ledger, size = Ledger(tmp_path), count_upload_bytes(fedavg.program, 20)
    policy = Policy(send=SendPolicy(max_bytes_per_day=2 * size))
    check(policy, fedavg, ledger)
    upload = Manifest("blake3:aa", size + 1, 1024)
    ledger.note_result(Result("run", 1, "train", 20, {}, ResourceUse(), upload), fedavg.program)
    with pytest.raises(NotAllowed, check=has_code("FV1432", "has room again in 24 h")) as raised:
        check(policy, fedavg, ledger)
    assert 86_000 < raised.value.again_s <= 86_400


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("threshold", [0.3, 1.0, 1.7, 20.0])
def test_features_take_no_more_bytes_than_are_counted_before_the_training(
    eftvit: Setting, kind: str, threshold: float
) -> None:
    [phase] = eftvit.program.train
    assert phase.collect is not None
    collect = msgspec.structs.replace(phase.collect, threshold=threshold)
    row_bytes, draw = 4 * math.prod(collect.shape) + 8, np.random.default_rng(0)
    cases = [
        ([1, 10, 10], 10),
        *((draw.integers(1, 12, classes), epochs) for classes in range(1, 9) for epochs in (1, 2, 9)),
    ]
    for counts, epochs in cases:
        trained = msgspec.structs.replace(phase, epochs=epochs, collect=collect)
        program, labels = (
            msgspec.structs.replace(eftvit.program, train=(trained,)),
            np.repeat(range(len(counts)), counts),
        )
        counted = count_upload_bytes(program, len(labels))
        assert counted <= epochs * len(labels) * row_bytes
        for sampled in (labels, labels[:, None]):
            sampler = SAMPLERS[kind](sampled, epochs, threshold, draw)
            rows, readable = np.arange(len(labels)), np.ones(len(labels), np.bool_)
            chosen = sum(len(sampler.positions(epoch, rows, readable)) for epoch in range(epochs))
            assert chosen * row_bytes <= counted


def test_device_declines_and_does_the_next_task(world: World, fedavg: Setting, eftvit: Setting) -> None:
    world.device(policy=Policy(send=SendPolicy(features="none")))
    world.give(eftvit)
    declined = world.server.expect(Declined)
    assert 'features = "none"' in declined.reason
    [refused] = [line for line in Ledger(world.state).read() if line.kind == "refused" and line.run == "run"]
    assert refused.reason == declined.reason
    assert world.result(fedavg, round=2).upload is not None
