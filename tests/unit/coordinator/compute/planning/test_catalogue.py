"""What the list of methods says is what the methods do."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from coordinator.cli import cli
from coordinator.compute.planning.catalogue import catalogue, options_of
from coordinator.compute.planning.method_entry import MethodEntry, page, read_stored_entries, table
from fedvit.errors import ConfigError
from fedvit.methods import METHODS, make_method
from fedvit.methods.apfl import APFL
from fedvit.models import SMALL
from fedvit.program import Role
from tests.support.children import run_child
from tests.support.codes import has_code
from tests.support.packages import NORMS, install

VIT_B = "vit_base_patch16_224"


def entries(*names: str, model: str = SMALL, classes: int = 10, **options: Any) -> list[MethodEntry]:
    return catalogue(names or sorted(METHODS), model, classes, options=options, model_options={})


@pytest.fixture(scope="module")
def everything() -> list[MethodEntry]:
    return entries()


def test_page_says_what_each_method_needs_of_a_policy(everything: list[MethodEntry]) -> None:
    rows = [line.split("|") for line in Path("docs/methods.md").read_text().splitlines() if line.startswith("| ")]
    table = [(re.findall(r"`(\w+)`", row[2]), row[3].strip()) for row in rows if len(row) == 5]
    needs = {name: needed for names, needed in table for name in names if name in METHODS}
    assert needs == {entry.name: str(entry.needs).partition(" masked")[0] for entry in everything}


def test_page_says_what_a_novel_device_has_of_each_method() -> None:
    _, _, behind = Path("docs/methods.md").read_text().partition("| methods | the own part |\n|---|---|\n")
    rows, _, _ = behind.partition("\n\n")
    assert {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])} == METHODS.keys()


# --- figures ------------------------------------------------------------------------------------------


def test_every_method_is_listed(everything: list[MethodEntry]) -> None:
    assert [entry.name for entry in everything] == sorted(METHODS)
    for entry in everything:
        assert entry.source == METHODS[entry.name].source
        assert entry.on_device
        assert entry.travels
        assert entry.doc


def test_stored_entries_are_those_that_are_computed(everything: list[MethodEntry]) -> None:
    """If this fails after a change of methods or models: make methods."""
    stored = read_stored_entries()
    assert stored is not None, "methods or models were changed: make methods"
    assert msgspec.to_builtins(stored) == msgspec.json.decode(msgspec.json.encode(everything))


@pytest.mark.parametrize("arguments", [["methods"], ["methods", "eftvit"], ["methods", "--method", "fedavg", "--json"]])
def test_methods_are_shown_without_torch(arguments: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from coordinator.cli import main; main()"
    done = run_child([sys.executable, "-c", code, *arguments])
    assert done.returncode == 0, done.stderr
    shown = METHODS if arguments == ["methods"] else [name for name in arguments if name in METHODS]
    assert all(name in done.stdout for name in shown)


def test_methods_of_packages_are_listed_with_the_stored_ones(tmp_path: Path) -> None:
    install(tmp_path, "acme-norms", {"norms_alone": "acme_norms:Norms", "gone": "nowhere:Gone"}, acme_norms=NORMS)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = run_child(
        [sys.executable, "-c", "from coordinator.cli import main; main()", "methods", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert [entry["name"] for entry in msgspec.json.decode(done.stdout)] == sorted([*METHODS, "norms_alone"])
    assert "left out: method 'gone' of package acme-norms" in done.stderr


def test_numbers_add_up(everything: list[MethodEntry]) -> None:
    """Tensors are float32; what does not come each round comes once; nothing local is sent back."""
    for entry in everything:
        by_role = {role: sum(g.parameters for g in entry.groups if g.role is role) for role in Role}
        assert sum(by_role.values()) == entry.parameters
        assert entry.bytes_down + entry.bytes_once == 4 * entry.parameters
        assert entry.bytes_once == 4 * (by_role[Role.FROZEN] + by_role[Role.LOCAL])
        assert entry.bytes_up == 4 * (by_role[Role.SHARED] + by_role[Role.GENERATED])
        assert entry.parameters_local == by_role[Role.LOCAL]
        untrained = by_role[Role.FROZEN] + by_role[Role.GLOBAL] + by_role[Role.ASSIGNED]
        assert entry.parameters_trained == entry.parameters - untrained


def test_fedavg_of_a_vit_base() -> None:
    """85 798 656 numbers and a head of 769 * 100, each way."""
    [entry] = entries("fedavg", model=VIT_B, classes=100)
    assert entry.parameters == entry.parameters_trained == 85_875_556
    assert (entry.bytes_down, entry.bytes_up, entry.bytes_once) == (4 * 85_875_556, 4 * 85_875_556, 0)


def test_eftvit_of_a_vit_base() -> None:
    """The device trains the embedding (742 656), two blocks of 7 087 872 and the head; it sends features of 1 + 49
    tokens of 768 numbers and a label of 8 bytes for each image that its sampler chooses, and no tensor."""
    [entry] = entries("eftvit", model=VIT_B, classes=100)
    local, head, norm, block = 742_656 + 2 * 7_087_872, 76_900, 1_536, 7_087_872
    assert entry.parameters_trained == local + head
    assert entry.parameters_local == local
    assert entry.bytes_down == 4 * (head + norm + 10 * block)
    assert (entry.bytes_up, entry.bytes_once) == (0, 4 * local)
    assert entry.bytes_up_per_image == 50 * 768 * 4 + 8


def test_options_change_the_figures() -> None:
    [few] = entries("eftvit", model=VIT_B, mask=0.95)
    assert few.bytes_up_per_image == 10 * 768 * 4 + 8
    [whole] = entries("fedtp", head="local")
    assert "trains and keeps head" in whole.on_device


def test_a_twin_is_kept_as_large_as_the_model() -> None:
    [entry] = entries("apfl")
    assert entry.parameters_local == entry.parameters_trained - entry.parameters_local + 1  # and alpha
    [entry] = entries("pfedme")
    assert entry.bytes_once == entry.bytes_down == entry.bytes_up


# --- words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "on_device", "travels"),
    [
        ("fedavg", "trains and returns model", "down: model; up: changes of model"),
        ("local", "trains and keeps model", "nothing"),
        (
            "apfl",
            "trains and returns model; trains and keeps twin, alpha",
            "down: model; up: changes of model",
        ),
        (
            "eftvit",
            "trains and keeps local; trains a copy of head; uses the server's norm, block.2 to block.5",
            "down: head, norm, block.2 to block.5; up: features.2 of chosen images",
        ),
        (
            "pfedpg",
            "trains and returns prompts, made for it; trains and keeps head; uses the fixed backbone",
            "down: prompts; up: changes of prompts",
        ),
    ],
)
def test_what_is_said(name: str, on_device: str, travels: str) -> None:
    [entry] = entries(name)
    assert (entry.on_device, entry.travels) == (on_device, travels)


def test_options_say_what_they_are() -> None:
    """Ranges are those that `make_method` checks, texts the comments in the code; what a method inherits it has."""
    listed = {option.option: option for option in options_of(APFL)}
    assert listed["alpha"].allowed == "number >= 0 <= 1"
    assert listed["alpha"].text == "first share of the personal model; 1 is training alone"
    assert (listed["adaptive"].default, listed["adaptive"].allowed) == (True, "true | false")
    assert (listed["epochs"].default, listed["epochs"].allowed) == (1, "whole number >= 1")
    assert listed["epochs"].text == "passes over the device's images per round (papers: E)"
    assert listed["clip_norm"].allowed == "number > 0 | none"
    assert listed["optimizer"].allowed.split(" | ") == ["adamw", "sgd"]
    above = {option.option: option.text for option in options_of(METHODS["pfedpg"])}
    assert above["evaluate_with"].startswith("prompts in a test: ")


def test_every_option_is_known_to_its_method(everything: list[MethodEntry]) -> None:
    for entry in everything:
        defaults = {option.option: option.default for option in entry.options}
        assert make_method(entry.name, defaults) == make_method(entry.name)
        assert all(option.allowed for option in entry.options)


# --- for people and programs --------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_nothing_is_cut_from_the_table(everything: list[MethodEntry], width: int) -> None:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table(everything, SMALL, 10))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    for entry in everything:
        assert any(line.split()[:1] == [entry.name] for line in lines)
    assert "…" not in capture.get()


def test_pages_fit(everything: list[MethodEntry]) -> None:
    console = Console(width=80)
    for entry in everything:
        with console.capture() as capture:
            console.print(page(entry, SMALL, 10))
        assert max(map(len, capture.get().splitlines())) <= 80
        assert all(option.option in capture.get() for option in entry.options)


def test_entries_are_plain_json(everything: list[MethodEntry]) -> None:
    said = msgspec.json.decode(msgspec.json.encode(everything))
    assert {"name", "source", "on_device", "travels", "bytes_down", "bytes_up", "bytes_once"} <= said[0].keys()
    assert msgspec.convert(said, list[MethodEntry]) == everything


# --- errors -------------------------------------------------------------------------------------------


def test_options_and_models_that_a_method_cannot_have() -> None:
    done = CliRunner().invoke(cli, ["methods", "-o", "mu=0.5"])
    assert re.search(r"method '\w+' has no option 'mu'.*; --method lists some methods alone", str(done.exception))
    with pytest.raises(ConfigError, check=has_code("FV1101")):
        entries("fedavg", mu=0.5)
    with pytest.raises(ConfigError, check=has_code("FV1104")):
        entries("eftvit", local_blocks=6)


def test_no_memory_is_taken_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are on torch's device without storage."""
    seen = []
    build = catalogue.__globals__["build_model"]

    def watched(*given: Any, **named: Any) -> Any:
        vit = build(*given, **named)
        seen.extend(value.device for value in vit.tensors().values())
        return vit

    monkeypatch.setattr("coordinator.compute.planning.catalogue.build_model", watched)
    entries("fedavg", "eftvit", model=VIT_B)
    assert set(seen) == {torch.device("meta")}
