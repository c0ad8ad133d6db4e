"""docs/troubleshooting.md has every error that a user can meet, as the programs say it."""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedvit import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet")
ERRORS = {
    "storage_failed",  # makes the error of a full disk, or of one that is not writable
    *(name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.FedvitError)),
}
VALUE = "…"
"""Stands for whatever a message has in it of the moment: names, numbers, the error of another library."""
LEAST_LETTERS = 5
"""A message with fewer of its own, as `FILE: REASON`, is said in the words of another one."""


class Message(NamedTuple):
    text: str
    place: str


@cache
def messages() -> tuple[Message, ...]:
    return tuple(collect())


def collect() -> Iterator[Message]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
            own = {node.name for node in nodes if isinstance(node, ast.ClassDef) and is_error(node)}
            for node in nodes:
                if isinstance(node, ast.Call) and node.args and called(node) in ERRORS | own:
                    for text in own_words([template(node.args[0])]) or own_words(inner(node.args[0], functions)):
                        yield Message(text, f"{file.relative_to(ROOT)}:{node.lineno}")


def is_error(node: ast.ClassDef) -> bool:
    """Whether a class of the file is a kind of error, with the arguments of one."""
    makes_text = any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in node.body)
    return any(ast.unparse(base).split(".")[-1] in ERRORS for base in node.bases) and not makes_text


def called(node: ast.Call) -> str:
    return ast.unparse(node.func).split(".")[-1]


def inner(argument: ast.expr, functions: Mapping[str, ast.FunctionDef]) -> Iterator[str]:
    """Of a message that is chosen, or made by a function of the same file: all that it can be."""
    for node in ast.walk(argument):
        if isinstance(node, ast.IfExp):
            yield from (template(node.body), template(node.orelse))
        if isinstance(node, ast.Call) and called(node) in functions:
            for made in ast.walk(functions[called(node)]):
                if isinstance(made, ast.Return) and made.value is not None:
                    yield template(made.value)


def own_words(texts: Iterable[str]) -> list[str]:
    texts = [re.sub(f"(?:{VALUE})+", VALUE, text) for text in texts]
    return [text for text in texts if len(re.findall(r"[a-z]", text)) >= LEAST_LETTERS]


def template(node: ast.expr) -> str:
    """What is always the same of a message."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return VALUE


def listed() -> set[str]:
    """What stands in the first column of the tables, by itself or with others."""
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.read_text().replace("\\|", "|"), re.MULTILINE)
    return {text.strip("` ") for row in rows for text in row.split("<br>")}


def test_page_has_every_error_of_the_programs() -> None:
    found = dict(messages())
    assert len(found) > 300
    missing = {text: place for text, place in found.items() if text.strip("` ") not in listed()}
    assert not missing, "rows for a table of the page:\n" + "\n".join(
        f"| `{text}` | CAUSE | WHAT TO DO |  <- {place}" for text, place in missing.items()
    )


def test_page_has_no_error_that_is_gone() -> None:
    said = {text.strip("` ") for text, _ in messages()}
    assert listed() - said == set()
