"""Names and texts use the field's words: none of the project's former private words is left in code, docs and tests."""

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from coordinator.cli import cli

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet", "bench")

NAMES = {
    "apart": "dedicated (topic)",
    "asking": "selector, cohort",
    "course": "run state",
    "desk": "enrolment service, result collector",
    "dispatch": "task scheduler",
    "economies": "trade-offs",
    "gathering": "batched commit",
    "lane": "dedicated topic; per-device step",
    "lanes": "dedicated topics; per-device steps",
    "ordeal": "scenario",
    "owed": "residual, error feedback",
    "patient": "doctor's context",
    "protection": "robust aggregation",
    "protections": "robust aggregation",
    "reception": "membership",
    "recipe": "delta, delta chain",
    "recipes": "deltas, delta chain",
    "rehearsal": "deterministic noise",
    "storey": "layer",
    "suffer": "inject",
    "suffered": "injected",
    "surgeries": "model patches",
    "surgery": "model patch",
    "taker": "receiver",
    "takers": "receivers",
    "workbench": "task executor",
}
"""Word that no identifier of code or tests has as a part -> the words to use."""

COMPOUNDS = {"give_back": "trim", "kept_share": "quality", "most_kept": "best quality", "told_of": "reported"}
"""The same for parts of several words."""

VERBS = {
    "moved": "updated",
    "moving": "updated",
    "said": "reported, logged",
    "say": "log, report",
    "says": "logs, reports",
    "tell": "send, log",
    "tells": "sends, logs",
    "told": "reported",
}
"""Words that no identifier of the packages has as a part; tests may use them in names of what they check."""

MODULES = {
    "admission.py": "validation.py",
    "conduct.py": "scheduler.py",
    "coordinator/compute/planning/fitting.py": "configuration search",
    "coordinator/compute/planning/targets.py": "device profiles",
    "coordinator/rounds/rounds.py": "coordinator.py",
    "moved.py": "traffic.py",
}
"""Ends of paths that no module has -> what to call it."""

PHRASES = {
    "goes on by itself": "resumes automatically",
    "are no time at all": "start and end are equal",
    "takes float32 alone": "supports float32 only",
    "has not the wanted execution provider": "execution provider ... is not available",
    "and more than nothing": "must be > 0",
    "so manieth": "round-robin",
    "storey": "layer",
    "ordeal": "scenario",
    "whoever": "the device, the operator",
    "it said nothing": "no output",
    "workbench": "task executor",
    "rehearsal": "deterministic noise",
    "surgery": "model patch",
}
"""Text in code, comments, docs and tests, in any case -> what to write."""

ALLOWED = {
    ("*", "moved_bytes"): "bytes that a graph reads and writes, a key of what `profile --json` prints",
    ("tests/unit/fleet/datasets/test_cifar.py", "dispatch"): "a name of pickle",
    ("*", "recipes"): "a field of the message Task, which older devices read",
    ("*", "apart"): "a field of the message BlobNack, likewise",
    ("*", "rehearsal"): "a field of a Program, whose digest covers its name",
    ("*", "__torch_dispatch__"): "a name of torch",
    ("*", "torch_dispatch"): "a name of torch",
    ("docs/glossary.md", "storey"): "not used now; the page may name old words",
}
"""(file or *, identifier or phrase) -> why it may stay."""

WITHOUT_OUT = ("runs", "show", "status", "quarantine", "devices", "costs", "gc", "serve", "start", "submit", "cancel")
"""Commands of `coordinator` that only read or run: --runs is their folder, --out is for files that a command writes."""


class Use(NamedTuple):
    """A former word in a file."""

    place: str
    word: str
    instead: str


def parts(identifier: str) -> list[str]:
    """
    >>> parts("CohortSelector"), parts("_give_back2"), parts("MAX_RSS")
    (['cohort', 'selector'], ['give', 'back', '2'], ['max', 'rss'])
    """
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def is_allowed(file: str, word: str) -> bool:
    return (file, word) in ALLOWED or ("*", word) in ALLOWED


def names_in(file: Path, words: dict[str, str]) -> Iterator[Use]:
    """Former words that are parts of identifiers of a Python file."""
    where = str(file.relative_to(ROOT))
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type != tokenize.NAME or is_allowed(where, token.string):
            continue
        found = parts(token.string)
        joined = f"_{'_'.join(found)}_"
        for word, instead in words.items():
            if (word in found or ("_" in word and f"_{word}_" in joined)) and not is_allowed(where, word):
                yield Use(f"{where}:{token.start[0]} {token.string}", word, instead)


def phrases_in(file: Path) -> Iterator[Use]:
    where = str(file.relative_to(ROOT))
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        for phrase, instead in PHRASES.items():
            if phrase in line.lower() and not is_allowed(where, phrase):
                yield Use(f"{where}:{number}", phrase, instead)


@cache
def python_files(folder: str) -> tuple[Path, ...]:
    return tuple(file for file in sorted((ROOT / folder).rglob("*.py")) if file != Path(__file__))


def shown(uses: list[Use]) -> str:
    return "\n".join(f"{use.place}: {use.word!r}; use: {use.instead}" for use in uses)


@pytest.mark.parametrize("folder", [*PACKAGES, "tests"])
def test_identifiers_have_no_private_words(folder: str) -> None:
    words = {**NAMES, **COMPOUNDS, **({} if folder == "tests" else VERBS)}
    uses = [use for file in python_files(folder) for use in names_in(file, words)]
    assert not uses, shown(uses)


@pytest.mark.parametrize("folder", PACKAGES)
def test_modules_have_no_private_names(folder: str) -> None:
    found = []
    for file in python_files(folder):
        path = str(file.relative_to(ROOT))
        found += [f"{path}: {new}" for old, new in MODULES.items() if f"/{path}".endswith(f"/{old}")]
        found += [f"{path}: {NAMES[part]}" for part in parts(file.stem) if part in NAMES]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "docs"])
def test_texts_have_no_private_phrases(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.md")) if folder == "docs" else python_files(folder)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"] if folder == "docs" else []
    uses = [use for file in (*files, *pages) for use in phrases_in(file)]
    assert not uses, shown(uses)


def test_pages_and_commands_use_no_out_for_the_folder_of_runs() -> None:
    # commands that write no file have no out: --out names what a command writes, and never the folder of runs that
    # it reads
    commands = cli.list_commands(click.Context(cli))
    for name in WITHOUT_OUT:
        command = cli.get_command(click.Context(cli), name)
        if name in commands and command is not None:
            assert "--out" not in [option for parameter in command.params for option in parameter.opts], name
    pattern = re.compile(rf"coordinator ({'|'.join(WITHOUT_OUT)})\b[^`\n|]* --out\b")
    pages = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    found = [f"{page.relative_to(ROOT)}: {match[0]}" for page in pages for match in pattern.finditer(page.read_text())]
    assert not found, "\n".join(found)
