"""The documents hold together: links lead somewhere, the README stays short."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from coordinator.config import make_config
from tests.support.command_lines import parse, shown_in

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "fleet" / "experiments").rglob("*.md")),
]
README_LINES, README_WORDS = 130, 900
PICTURE_BYTES = 150_000


def without_code(page: Path) -> str:
    """The text of a page without its blocks of code and its quoted code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them: small letters, no punctuation, hyphens for spaces."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"\bdocs/[\w/-]+\.md\b", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_that_sources_name_are_there() -> None:
    packages = ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet", "bench")
    files = [
        file for package in packages for kind in ("py", "toml", "html") for file in (ROOT / package).rglob(f"*.{kind}")
    ]
    named = {name for file in files for name in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text())}
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_of_a_page_are_understood(page: Path) -> None:
    for words in shown_in(page):
        parse(words)


@pytest.mark.parametrize("page", ["quickstart.md", "write-a-method.md", "configuration.md"])
def test_configurations_of_a_page_are_accepted(page: str) -> None:
    found = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    assert found
    for text in found:
        make_config(tomllib.loads(text), page)


def test_readme_is_short_shows_the_method_and_names_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    assert len(text.split()) <= README_WORDS
    [block] = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = (ROOT / "fedvit" / "methods" / "fedprox.py").read_text().splitlines()
    assert [line for line in block.splitlines() if line not in lines] == []
    readme = (ROOT / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if f"docs/{name}" not in readme] == []


def test_pictures_are_small_and_shown() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert pictures
    assert [picture.name for picture in pictures if picture.stat().st_size > PICTURE_BYTES] == []
    assert [picture.name for picture in pictures if f"pictures/{picture.name}" not in shown] == []


def names_defined(folders: list[str]) -> set[str]:
    """Names of classes, functions and constants of modules, and of methods as `Class.method`."""
    names: set[str] = set()
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                members = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                names |= {node.name, *(f"{node.name}.{member}" for member in members)}
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_the_architecture_answers_with_files_and_names_that_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    questions = re.findall(r"^\| (Where .*\?) \| (.*) \|$", page, re.MULTILINE)
    stations = re.findall(r"^\d+\. (.*)$", page, re.MULTILINE)
    assert len(questions) >= 6
    assert len(stations) == 12
    known = names_defined(["coordinator", "edge_client", "fedvit"])
    quoted = re.findall(r"`([^`]+)`", " ".join([*(answer for _, answer in questions), *stations]))
    files = {name for name in quoted if "/" in name}
    assert not {name for name in files if not (ROOT / name).exists()}
    missing = {name for name in quoted if re.fullmatch(r"_?[A-Z]\w*(\.\w+)?", name)} - known
    assert not missing
