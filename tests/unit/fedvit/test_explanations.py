"""Every error has a code, and every code an explanation."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import coordinator.cli
import edge_client.cli
import fleet.cli
from fedvit import errors
from fedvit.explanations import MARK, read_explanations, render_page
from tests.support.codes import has_code

ROOT = Path(__file__).parents[3]
KINDS = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.FedvitError)
}


def list_codes() -> Iterator[tuple[str, str]]:
    """List the codes that the packages give to their errors, each with its place."""
    for package in ("fedvit", "export", "profiles", "edge_client", "coordinator", "fleet"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and re.fullmatch(r"FV\d{4}", str(node.value)):
                    yield node.value, f"{file.relative_to(ROOT)}:{node.lineno}"


def test_codes_of_the_programs_are_those_that_are_explained() -> None:
    explained = read_explanations().keys()
    assert [place for code, place in list_codes() if code not in explained] == []
    assert read_explanations().keys() == {code for code, _ in list_codes()}
    assert len({kind.general_code for kind in KINDS.values()}) == len(KINDS)


def test_the_page_is_written_from_the_explanations() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert page.partition(MARK)[1:] == (MARK, render_page().removeprefix(MARK)), "run `make errors`"


@pytest.mark.parametrize("program", [coordinator.cli.cli, edge_client.cli.cli, fleet.cli.cli])
def test_each_program_explains_a_code(program: object) -> None:
    printed = CliRunner().invoke(program, ["explain", "fv1101"])  # type: ignore[arg-type]
    assert printed.exit_code == 0
    assert printed.stdout.startswith("FV1101: ")
    assert " ".join(read_explanations()["FV1101"].remedy.split()) in " ".join(printed.stdout.split())


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(errors.ConfigError, check=has_code("FV1910")):
        CliRunner().invoke(coordinator.cli.cli, ["explain", "FV9999"], catch_exceptions=False, standalone_mode=False)
