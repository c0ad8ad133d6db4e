"""What is installed is what is here."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_packages_of_the_wheel_are_all_there_are() -> None:
    """An editable installation finds every folder; the wheel has those that are listed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = {name.partition(".")[0] for name in listed}
    found = {file.parent.relative_to(ROOT) for root in roots for file in (ROOT / root).rglob("__init__.py")}
    assert sorted(listed) == sorted(".".join(folder.parts) for folder in found)
