"""The server's training in two processes: its numbers are those of one, and a process that dies loses nothing."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.compute import ranks
from coordinator.compute.checkpoint import load_state, save_state
from coordinator.compute.closing import Closing, Placement, StoredUploads
from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.ranks import Ranks
from coordinator.config import UpdatesConfig
from coordinator.record.tables import SavedState
from fedvit.errors import DeviceTrouble, EmptyCohort, FedvitError
from fedvit.methods import build_model, make_method
from fedvit.methods.aggregators import Mean
from fedvit.methods.base import ServerRule, ServerState, Upload
from fedvit.models import SMALL
from fedvit.models.vit import PatchViT
from fedvit.program import Role
from fedvit.tensors import Tensors, pack
from tests.support.codes import has_code
from tests.support.forked import ForkedRank
from tests.support.waiting import WAIT_S

MODEL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "heads": 2}
CLASSES, SEED = 5, 3
FROM_SERVER = (Role.FROZEN, Role.GLOBAL, Role.SEEDED, Role.SHARED)
TOLERANCE = 1e-5
"""Of a tensor after 20 AdamW steps at a rate of 0.001, or of a generator after one step: docs/configuration.md."""


@dataclass
class Server:
    """One method's server half, with a state and uploads of noise in files."""

    rule: ServerRule
    vit: PatchViT
    blobs: VerifiedBlobs
    closing: Closing

    def alone(self, **changes: Any) -> tuple[SavedState, dict[str, float]]:
        """What one process makes of the round."""
        return replace(self.closing, **changes).run(
            self.rule, self.vit, self.blobs, Placement("cpu"), lambda text: None
        )

    def values(self, saved: SavedState) -> Tensors:
        state = load_state(saved, self.blobs)
        return {**state.tensors, **state.memory}

    def apart(self, one: SavedState, other: SavedState) -> float:
        """The largest difference between two states."""
        before, after = self.values(one), self.values(other)
        assert before.keys() == after.keys()
        return max(float(np.abs(before[name] - after[name]).max()) for name in before)

    def upload(self, device: str, tensors: Tensors) -> Upload:
        digest = self.blobs.put(pack(tensors)).digest
        return Upload(device, 4, digest, partial(self.closing.stored, digest))


def server(folder: Path, name: str, options: dict[str, Any]) -> Server:
    method = make_method(name, options)
    vit = build_model(method, SMALL, CLASSES, seed=0, options=MODEL)
    rule, blobs = method.server_rule(vit), VerifiedBlobs(folder / "blobs")
    names = method.names_with(vit, *FROM_SERVER)
    tensors = {name: value.numpy().copy() for name, value in method.tensors(vit).items() if name in names}
    groups = {"all": names}
    before = save_state(ServerState(tensors, rule.begin(SEED)), groups, blobs)
    closing = Closing(
        round=1, rounds=3, seed=SEED, method=method, before=before, kept={},
        uploads=[], stored=StoredUploads(blobs.folder, {}), names=names, groups=groups,
        updates=UpdatesConfig(), aggregator=Mean(), precision="fp32",
    )  # fmt: skip
    return Server(rule, vit, blobs, closing)


def features(seed: int, *, items: int = 7, block: int = 1) -> Tensors:
    draw = np.random.default_rng(seed)
    values = draw.standard_normal((items, 17, MODEL["width"]), np.float32)
    return {f"features.{block}": values, "labels": draw.integers(CLASSES, size=items)}


def trained_on(of: Server, *uploads: Tensors) -> Server:
    sent = [of.upload(f"device-{number}", upload) for number, upload in enumerate(uploads)]
    return replace(of, closing=replace(of.closing, uploads=sent))


@pytest.fixture
def eftvit(tmp_path: Path) -> Server:
    """21 items in batches of 5: the last of an epoch is one item for two processes."""
    options = {"local_blocks": 1, "server_epochs": 4, "server_batch_size": 5, "server_lr": 1e-3}
    return trained_on(server(tmp_path, "eftvit", options), *(features(number) for number in range(3)))


class Team:
    """Two processes, of what they say everything."""

    def __init__(self, of: Server) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.at: Callable[[str], None] = lambda text: None
        self.ranks = Ranks(("cpu", "cpu"), of.rule, of.vit, of.blobs, self._hear, self.warned.append)

    def close(self, of: Server, **changes: Any) -> tuple[SavedState, dict[str, float]]:
        return self.ranks.close_round(replace(of.closing, **changes))

    def _hear(self, text: str) -> None:
        self.said.append(text)
        self.at(text)


@pytest.fixture
def team_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Server], Team]]:
    """Processes that have torch at once; they end with the test."""
    monkeypatch.setattr(ranks, "spawn", ForkedRank)
    monkeypatch.setattr(ranks, "END_S", 0.5)
    teams: list[Team] = []

    def start(of: Server) -> Team:
        teams.append(Team(of))
        return teams[-1]

    yield start
    for team in teams:
        team.ranks.stop()


# --- numbers ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_as_one_does(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    """Within the tolerance; and other processes, with the same bits. A second round has the optimizer's state."""
    team = team_of(eftvit)
    saved, figures = team.close(eftvit)
    alone, expected = eftvit.alone()
    assert 0 < eftvit.apart(saved, alone) < TOLERANCE
    assert figures == pytest.approx(expected, rel=1e-5)
    assert "server epoch 4/4, batch 5/5" in team.said
    later = {"round": 2, "before": saved}
    again, _ = team.close(eftvit, **later)
    assert eftvit.apart(again, eftvit.alone(**later)[0]) < TOLERANCE
    assert team_of(eftvit).close(eftvit) == (saved, figures)
    assert team.close(eftvit, **later)[0] == again


def test_devices_of_different_splits_share_two_processes(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    """Blocks below the one that a batch enters stay as they are, weight decay included."""
    mixed = trained_on(eftvit, features(1, block=1), features(2, block=2))
    assert mixed.apart(team_of(mixed).close(mixed)[0], mixed.alone()[0]) < TOLERANCE
    late = trained_on(eftvit, features(3, block=2))
    saved, _ = team_of(late).close(late)
    assert late.apart(saved, late.alone()[0]) < TOLERANCE
    before, after = late.values(late.closing.before), late.values(saved)
    assert all((before[name] == after[name]).all() for name in before if name.startswith("blocks.1."))


@pytest.mark.parametrize("method", ["fedtp", "pfedpg"])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_generator_learns_the_same_of_two_processes(
    tmp_path: Path, team_of: Callable[[Server], Team], method: str, devices: int
) -> None:
    """Each pulls back some devices' updates; of FedTP the mean of the other tensors comes from one process."""
    of = server(tmp_path, method, {})
    sent = of.rule.generate(load_state(of.closing.before, of.blobs), "any", SEED)
    sent |= {name: of.values(of.closing.before)[name] for name in of.closing.names}
    draw = np.random.default_rng(1)
    of = trained_on(
        of,
        *(
            {name: 0.1 * draw.standard_normal(value.shape, np.float32) for name, value in sent.items()}
            for _ in range(devices)
        ),
    )
    team = team_of(of)
    saved, figures = team.close(of)
    alone, expected = of.alone()
    assert of.apart(saved, alone) < TOLERANCE
    assert saved.memory != of.closing.before.memory
    assert figures == pytest.approx(expected, rel=1e-4)
    assert team.close(of) == (saved, figures)


def test_products_in_bfloat16_are_near_those_in_float32(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    """In one process and in two; weights and the optimizer's state stay float32."""
    exact, _ = eftvit.alone()
    rounded, figures = eftvit.alone(precision="bf16")
    assert 1e-5 < eftvit.apart(exact, rounded) < 0.05
    assert {value.dtype for value in eftvit.values(rounded).values()} == {np.dtype("float32")}
    shared, of_two = team_of(eftvit).close(eftvit, precision="bf16")
    assert 1e-5 < eftvit.apart(exact, shared) < 0.05
    assert of_two["server_loss"] == pytest.approx(figures["server_loss"], rel=0.02)


# --- failures -----------------------------------------------------------------------------------------


def test_a_process_that_is_killed_in_a_round_loses_nothing(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    team = team_of(eftvit)
    killed: list[int] = []

    def kill(text: str) -> None:
        if text == "server epoch 2/4, batch 2/5" and not killed:
            killed.extend(team.ranks.pids)
            os.kill(killed[1], signal.SIGKILL)

    team.at = kill
    saved, _ = team.close(eftvit)
    assert team.warned == [
        f"rank 1 of 2 of the server's training (cpu, process {killed[1]}) ended with signal 9 (SIGKILL); "
        "the server step of round 1 is repeated, nothing is lost"
    ]
    assert not set(killed) & set(team.ranks.pids)
    assert saved == team_of(eftvit).close(eftvit)[0]


def test_a_process_that_is_killed_between_rounds_is_replaced(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    team = team_of(eftvit)
    first, _ = team.close(eftvit)
    os.kill(team.ranks.pids[0], signal.SIGKILL)
    assert team.close(eftvit)[0] == first
    assert len(team.warned) == 1
    assert "rank 0 of 2" in team.warned[0]


def test_processes_that_die_each_time_fail_the_round(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    team = team_of(eftvit)
    team.at = lambda text: os.kill(team.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(DeviceTrouble, check=has_code("FV1511")):
        team.close(eftvit)
    assert len(team.warned) == 2
    assert team.ranks.pids == []


def test_one_process_that_fails_ends_the_round_with_its_reason(
    eftvit: Server, team_of: Callable[[Server], Team]
) -> None:
    """The other one would wait for it; afterwards new processes close a sound round."""
    wrong = features(1)
    wrong["labels"][3] = 99
    team = team_of(eftvit)
    with pytest.raises(FedvitError, check=has_code("FV1511")):
        team.close(trained_on(eftvit, wrong))
    assert team.close(eftvit)[0].groups
    assert team.warned == []


def test_errors_of_a_round_are_those_of_one_process(eftvit: Server, team_of: Callable[[Server], Team]) -> None:
    with pytest.raises(EmptyCohort, check=has_code("FV1502")):
        team_of(eftvit).close(eftvit, uploads=[])


def test_a_process_as_it_is_spawned_ends_with_its_input() -> None:
    """That is what kill -9 of the worker process gives it."""
    child = ranks.spawn()
    assert child.poll() is None
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(WAIT_S) == 0
    assert child.stdout is not None
    child.stdout.close()
