"""The explanation of each error code: what happened, and what to do.

`explanations.toml` holds them. Every program prints one by `explain CODE`, and
`python -m fedvit.explanations docs/troubleshooting.md` writes them all into the page.
"""

import difflib
import sys
import textwrap
import tomllib
from importlib.resources import files
from pathlib import Path

import click
import msgspec

from fedvit.command_line import Command, json_flag
from fedvit.errors import ConfigError

LINE_CHARACTERS = 100
MARK = "<!-- written by `make errors` from fedvit/explanations.toml; change that file -->\n"


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Meaning and remedy of an error code, in Markdown without links."""

    title: str
    remedy: str
    meaning: str = ""  # what the title does not say
    page: str = ""  # of docs/, with an anchor, that says more; the code's link


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors of one subject: codes with the same two digits after FV."""

    title: str
    codes: dict[str, Explanation]


def read_sections() -> list[Section]:
    """Read all explanations, in the order of their codes."""
    return msgspec.convert(
        tomllib.loads(files("fedvit").joinpath("explanations.toml").read_text())["sections"], list[Section]
    )


def read_explanations() -> dict[str, Explanation]:
    """Read all explanations by code."""
    return {code: explanation for section in read_sections() for code, explanation in section.codes.items()}


def make_command(program: str) -> click.Command:
    """Make the command `explain` of a program."""

    @click.command("explain", cls=Command, examples=[f"{program} explain FV1101"])
    @click.argument("code")
    @json_flag
    def explain(code: str, as_json: bool) -> None:
        """Explain the error CODE: what happened, and what to do."""
        wanted = code.upper().strip("[]")
        explanation = find_explanation(wanted)
        if as_json:
            click.echo(msgspec.json.encode({"code": wanted, **msgspec.structs.asdict(explanation)}).decode())
            return
        more = f"More: docs/{explanation.page}" if explanation.page else ""
        texts = [f"{wanted}: {explanation.title}", explanation.meaning, explanation.remedy, more]
        click.echo("\n\n".join(textwrap.fill(text, LINE_CHARACTERS, break_long_words=False) for text in texts if text))

    return explain


def find_explanation(code: str) -> Explanation:
    """Find the explanation of a code. Raises ConfigError with similar codes for an unknown one."""
    explanations = read_explanations()
    if code not in explanations:
        near = ", ".join(difflib.get_close_matches(code, explanations, 3, 0.0))
        raise ConfigError("FV1910", f"error code {code!r} is unknown; similar codes: {near}")
    return explanations[code]


def render_page() -> str:
    """Render the sections of docs/troubleshooting.md that have codes."""
    lines = [MARK]
    for section in read_sections():
        lines.append(f"\n## {section.title}\n")
        for code, explanation in section.codes.items():
            name = f"[{code}]({explanation.page})" if explanation.page else code
            texts = f"**{name}: {explanation.title}.**", explanation.meaning, explanation.remedy
            lines.append(f"\n{' '.join(text for text in texts if text)}\n")
    return "".join(lines)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(page.read_text().partition(MARK)[0] + render_page())
