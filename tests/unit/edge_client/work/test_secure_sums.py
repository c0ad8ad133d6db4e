"""A device in secure sums: it answers from its vault, in the same way after every restart, and each payload once."""

import threading
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from edge_client.storage.ledger import Ledger
from edge_client.storage.sum_store import SumStore
from edge_client.storage.vault import Vault
from edge_client.storage.vault_key import VaultKey
from fedvit.errors import ConfigError
from fedvit.policy import Policy, SendPolicy
from fedvit.program import Program
from fedvit.program_versions import SECURE_VERSION
from fedvit.secure.attempt import begin_attempt
from fedvit.secure.layout import NUMBERS, Layout, find_rounding_seeds, make_training_payload, make_vector, read_training
from fedvit.secure.server import STEPS, SumServer, SumState
from fedvit.secure.vectors import Vector, count_bytes
from fedvit.wire.messages import (
    Progress,
    SumAnswer,
    SumId,
    SumInbox,
    SumInvite,
    SumKeys,
    SumMasked,
    SumNoise,
    SumRefused,
    SumReveal,
    SumShares,
    SumSigned,
    SumTerms,
)
from tests.support.agents import World, train_here
from tests.support.codes import has_code
from tests.support.settings import Setting
from tests.support.sums import MemoryDevice, make_terms
from tests.support.waiting import WAIT_S

ANSWERS = dict(zip(STEPS, (SumKeys, SumShares, SumMasked, SumSigned, SumReveal), strict=True))
Kind = TypeVar("Kind", bound=SumAnswer)


def _make_secure(setting: Setting) -> Program:
    return msgspec.structs.replace(setting.program, secure=True, v=SECURE_VERSION)


class Sum:
    """A coordinator's sum over the agent `pi` and two devices in memory."""

    def __init__(self, world: World, setting: Setting, attempt: int = 1) -> None:
        self.world = world
        self.layout = Layout.of_program(_make_secure(setting), "train")
        self.terms = SumTerms(self.layout.digest, 3, 20, 32, 4.0, 20)
        zeros = Vector.zeros(self.layout.words, self.layout.exact)
        self.others = {name: MemoryDevice(name, zeros) for name in ("x", "y")}
        state = SumState(sum=SumId("run", 1, "train", attempt), terms=self.terms)
        self.server = SumServer(state, ["pi", *self.others], words=self.layout.words, exact=self.layout.exact)

    def ask(self, kind: type[Kind]) -> Kind:
        """Ask the agent the question of the current step."""
        self.world.server.tell(self.server.question("pi"))
        return self.world.server.expect(kind)

    def step(self) -> SumAnswer:
        """Let all devices take a step."""
        answer = self.ask(ANSWERS[self.server.state.step])
        if isinstance(answer, SumMasked):
            content = answer.inline or self.world.server.fetch_bytes(answer.vector)
            self.server.take_masked("pi", content)
        else:
            assert self.server.take("pi", answer)
        for name, device in self.others.items():
            other = device.answer(self.server.question(name))
            if isinstance(other, bytes):
                self.server.take_masked(name, other)
            else:
                self.server.take(name, other)
        self.server.close_step()
        return answer


def test_device_that_restarts_in_each_step_gives_the_plain_update(world: World, fedavg: Setting, digits: Path) -> None:
    device, program = world.device(), _make_secure(fedavg)
    result = world.result(fedavg, program=program)
    assert (result.samples, result.metrics, result.upload) == (0, {}, None)
    world.server.acknowledge(result)
    added = Sum(world, fedavg)
    for _ in STEPS:
        device.stop()
        device = world.device()
        added.step()
    trained = read_training(added.layout, added.server.unmask(), added.terms)
    plain = train_here(fedavg, program, fedavg.start(), digits)
    assert trained.samples == 20
    assert trained.clipped == 0
    for name, mean in trained.mean.items():
        assert np.allclose(mean, plain[name] - fedavg.start()[name], atol=1e-6)
    [line] = [line for line in Ledger(world.state).read() if line.form == "sum"]
    assert (line.kind, line.what) == ("update", "inside a sum of 3 devices")


def test_mask_covers_one_payload_and_a_payload_is_revealed_once(world: World, fedavg: Setting) -> None:
    world.device()
    program = _make_secure(fedavg)
    world.server.acknowledge(world.result(fedavg, program=program))
    first = Sum(world, fedavg)
    first.step()
    first.step()
    masked = first.ask(SumMasked)
    other = {"model": {name: value + np.float32(0.5) for name, value in fedavg.start().items()}}
    again = world.result(fedavg, program=program, group_values=other, seed=6)  # the same round, rounded in another way
    world.server.acknowledge(again)
    assert first.ask(SumMasked).vector.digest == masked.vector.digest

    second = Sum(world, fedavg, attempt=2)
    for _ in STEPS:
        answer = second.step()
        if isinstance(answer, SumMasked):
            assert answer.vector.digest != masked.vector.digest
    world.server.tell(first.server.question("pi"))
    assert "not known" in world.server.expect(SumRefused).reason
    third = Sum(world, fedavg, attempt=3)
    assert "in a sum already" in third.ask(SumRefused).reason


def test_mask_covers_no_payload_of_a_round_that_came_back(world: World, fedavg: Setting) -> None:
    world.device()
    program = _make_secure(fedavg)
    world.server.acknowledge(world.result(fedavg, program=program))
    added = Sum(world, fedavg)
    added.step()
    added.step()
    added.ask(SumMasked)
    other = {"model": {name: value + np.float32(0.5) for name, value in fedavg.start().items()}}
    for number in (2, 1):
        again = world.result(fedavg, program=program, group_values=other, round=number)
        world.server.acknowledge(again)
    assert "not known" in added.ask(SumRefused).reason
    added = Sum(world, fedavg)
    for _ in range(3):
        added.step()
    assert len([line for line in Ledger(world.state).read() if line.form == "sum"]) == 2


def test_masks_are_made_for_one_attempt_at_a_time(
    world: World, fedavg: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that runs through attempts takes the memory of one."""
    begun, may_go_on = list[object](), threading.Event()

    def wait_first(*given: Any) -> Vector:
        begun.append(given)
        may_go_on.wait(WAIT_S)
        return make_vector(*given)

    monkeypatch.setattr("edge_client.work.secure_sums.make_vector", wait_first)
    world.device()
    world.server.acknowledge(world.result(fedavg, program=_make_secure(fedavg)))
    for attempt in (1, 2):
        added = Sum(world, fedavg, attempt)
        added.step()
        added.step()
        world.server.tell(added.server.question("pi"))
        world.server.mark()
    assert len(begun) == 1
    may_go_on.set()
    assert world.server.expect(SumMasked).sum.attempt == 1
    assert added.ask(SumMasked).sum.attempt == 2


def _begin_attempt(world: World, setting: Setting, attempt: int) -> Sum:
    """Take an attempt to the step in which the device adds its masks."""
    added = Sum(world, setting, attempt)
    added.step()
    added.step()
    return added


def test_attempts_count_to_the_bytes_of_a_day_and_a_repeated_answer_does_not(world: World, fedavg: Setting) -> None:
    layout = Layout.of_program(_make_secure(fedavg), "train")
    size = count_bytes(layout.words, layout.exact, 32)
    policy = Policy(send=SendPolicy(max_bytes_per_day=size * 3 // 2))
    device = world.device(policy=policy)
    world.server.acknowledge(world.result(fedavg, program=_make_secure(fedavg)))
    added = _begin_attempt(world, fedavg, 1)
    masked = added.ask(SumMasked)
    assert masked.vector.size == size
    device.stop()
    world.device(policy=policy)
    assert added.ask(SumMasked).vector == masked.vector
    assert "max_bytes_per_day" in _begin_attempt(world, fedavg, 2).ask(SumRefused).reason
    assert [line.bytes for line in Ledger(world.state).read() if line.form == "sum"] == [size]


def test_newest_attempt_alone_takes_disk(world: World, fedavg: Setting) -> None:
    device = world.device()
    world.server.acknowledge(world.result(fedavg, program=_make_secure(fedavg)))
    digests = []
    for attempt in (1, 2, 3):
        digests.append(_begin_attempt(world, fedavg, attempt).ask(SumMasked).vector.digest)
        assert [device.blobs.has(digest) for digest in digests] == [False] * (attempt - 1) + [True]


def test_masked_result_keeps_the_budgets_of_upload_and_disk(world: World, fedavg: Setting) -> None:
    layout = Layout.of_program(_make_secure(fedavg), "train")
    size = count_bytes(layout.words, layout.exact, 32)
    device = world.device(policy=Policy(send=SendPolicy(upload=size - 1)))
    world.server.acknowledge(world.result(fedavg, program=_make_secure(fedavg)))
    assert "policy: upload = " in _begin_attempt(world, fedavg, 1).ask(SumRefused).reason
    device.stop()
    device = world.device(policy=Policy(send=SendPolicy(upload=size)))
    device.agent.storage.disk.limit_bytes = 1
    assert "raise --disk-budget" in _begin_attempt(world, fedavg, 2).ask(SumRefused).reason
    device.agent.storage.disk.limit_bytes = None
    assert _begin_attempt(world, fedavg, 3).ask(SumMasked).vector.size == size


def test_progress_in_a_secure_run_has_no_loss(world: World, fedavg: Setting) -> None:
    world.device()
    world.result(fedavg, program=_make_secure(fedavg))
    reported = [message for message in world.server.heard if isinstance(message, Progress)]
    assert {message.loss for message in reported} == {None}


def test_device_refuses_what_its_policy_or_its_result_does_not_allow(world: World, fedavg: Setting) -> None:
    world.device(policy=Policy(send=SendPolicy(updates="sum")))
    refusal = world.refusal(fedavg)
    assert "sends the update of this device alone" in refusal
    program = _make_secure(fedavg)
    world.server.acknowledge(world.result(fedavg, program=program))
    added = Sum(world, fedavg)
    assert "has joined a deployment" in added.ask(SumRefused).reason
    world.server.tell(SumInvite(SumId("run", 1, "train", 1), make_terms(3)))
    assert "other tensors" in world.server.expect(SumRefused).reason
    world.server.tell(SumInvite(SumId("run", 2, "train", 1), added.terms))
    assert "no result of round 2" in world.server.expect(SumRefused).reason
    world.server.tell(SumInbox(SumId("run", 1, "train", 9), {}))
    assert "not known here" in world.server.expect(SumRefused).reason


@pytest.mark.parametrize("multiplier", [None, 0.4])
def test_device_refuses_a_sum_with_less_noise_than_its_owner_asks_for(
    world: World, fedavg: Setting, multiplier: float | None
) -> None:
    world.device(policy=Policy(send=SendPolicy(min_noise=0.5)))
    world.server.acknowledge(world.result(fedavg, program=_make_secure(fedavg)))
    sum_id, terms = SumId("run", 1, "train", 1), Sum(world, fedavg).terms
    little = SumNoise(1.0, multiplier) if multiplier else None
    world.server.tell(SumInvite(sum_id, msgspec.structs.replace(terms, noise=little)))
    assert f"is {multiplier or 0:g} times its clip" in world.server.expect(SumRefused).reason
    world.server.tell(SumInvite(sum_id, msgspec.structs.replace(terms, noise=SumNoise(1.0, 0.5))))
    assert world.server.expect(SumKeys).sum == sum_id


def test_run_that_was_secure_stays_secure(world: World, fedavg: Setting) -> None:
    world.device()
    world.server.acknowledge(world.result(fedavg, program=_make_secure(fedavg)))
    assert "would be sent alone" in world.refusal(fedavg, round=2)


def test_secrets_and_payloads_are_encrypted_with_the_key_of_the_vault(tmp_path: Path) -> None:
    key = VaultKey.load(tmp_path / "key", make=True)
    sums = SumStore(Vault(tmp_path / "vault", key))
    payload = make_training_payload({"w": np.ones(1000, np.float32)}, 20, 0.5)
    sums.keep_payload("run", 1, "train", payload)
    attempt = begin_attempt(SumInvite(SumId("run", 1, "train", 1), make_terms(3)), None)
    sums.keep_attempt(attempt)
    assert sums.read_attempt("run", 1, "train") == attempt
    kept = sums.read_payload(SumId("run", 1, "train", 1))
    assert kept is not None
    assert kept[NUMBERS].tolist() == [20, 0.5]
    files = [file.read_bytes() for file in (tmp_path / "vault").rglob("*") if file.is_file()]
    assert not any(attempt.mask_secret in content or payload["w"].tobytes()[:64] in content for content in files)
    with pytest.raises(ConfigError, check=has_code("FV1417")):
        SumStore(Vault(tmp_path / "vault", VaultKey.load(tmp_path / "other", make=True))).read_attempt(
            "run", 1, "train"
        )
    sums.keep_payload("run", 2, "train", payload)
    assert sums.read_payload(SumId("run", 1, "train", 1)) is None
    assert sums.read_attempt("run", 1, "train") is None


def test_rounding_is_that_of_the_run_and_the_device() -> None:
    payload = make_training_payload({"w": np.linspace(-1, 1, 1000, dtype=np.float32)}, 20, 0.5)
    drawn = [
        make_vector("train", payload, make_terms(1000), find_rounding_seeds(seed, number, device)).words.tobytes()
        for seed, number, device in ((5, 1, "pi"), (5, 1, "pi"), (6, 1, "pi"), (5, 2, "pi"), (5, 1, "nano"))
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4
