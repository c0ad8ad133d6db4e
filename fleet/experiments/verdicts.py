"""Verdicts on the papers' claims: the rule, and the tables of fleet/experiments/README.md.

`claims.toml` of `docs/results` says what each paper claims and which kept results answer it. `make verdicts` writes the
tables, and the page of all kept results.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from fedvit.errors import ConfigError
from fleet.experiments.kept_results import (
    KeptDifference,
    KeptResults,
    describe_difference,
    read_file,
    read_kept_results,
)
from fleet.experiments.measured import PAGE, render_measured

CLAIMS_FILE = "claims.toml"
MARK = "<!-- written by `make verdicts` from docs/results; change these files -->"
END = "<!-- end -->"
LEAST_SEEDS = 5
"""Seeds without which no measured difference is shown."""

Verdict = Literal["agrees", "contradicts", "not shown"]


class MeasuredClaim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim that one method is ahead of another."""

    paper: str
    claim: str
    published: str
    experiment: str
    partition: str
    ahead: str
    behind: str
    unfair: str = ""  # why the protocol does not answer the claim


class ComputedClaim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim that a computation answers, without training."""

    paper: str
    claim: str
    published: str
    here: str
    verdict: Verdict
    checked_by: str  # file::test


class Claims(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `CLAIMS_FILE`."""

    measured: list[MeasuredClaim]
    computed: list[ComputedClaim]


def judge(difference: KeptDifference, *, is_fair: bool) -> Verdict:
    """Return the verdict on a claim that `difference.method` is ahead of `difference.reference`."""
    interval = difference.interval
    if not is_fair or interval is None or difference.seeds < LEAST_SEEDS or interval.low <= 0 <= interval.high:
        return "not shown"
    return "agrees" if interval.low > 0 else "contradicts"


def read_claims(folder: Path) -> Claims:
    """Read `CLAIMS_FILE`. Raises ConfigError, StorageFailed."""
    return read_file(folder / CLAIMS_FILE, Claims)


def render_verdicts(claims: Claims, results: dict[str, KeptResults]) -> str:
    """Render a table for each paper. Raises ConfigError for a claim whose figures were not kept."""
    rows: dict[str, list[str]] = {}
    for claim in claims.measured:
        if claim.experiment not in results:
            raise ConfigError("FV2151", f"{claim.paper}: the results of {claim.experiment!r} were not kept")
        kept = results[claim.experiment]
        difference = kept.find_difference(claim.ahead, claim.behind, claim.partition)
        reason = claim.unfair or kept.find_edge(difference)
        verdict = judge(difference, is_fair=not reason)
        shown = f"**{verdict}**" if verdict != "not shown" else f"{verdict}{f': {reason}' * bool(reason)}"
        scale = f"{kept.scale}; {difference.seeds} seed{'s' * (difference.seeds > 1)}"
        cells = (claim.claim, claim.published, describe_difference(difference), scale, shown)
        rows.setdefault(claim.paper, []).append(_render_row(cells))
    for fact in claims.computed:
        cells = (fact.claim, fact.published, fact.here, "computed", f"**{fact.verdict}**")
        rows.setdefault(fact.paper, []).append(_render_row(cells))
    head = "| claim | published | here | scale | verdict |\n|---|---|---|---|---|\n"
    return "\n".join(f"### {paper}\n\n{head}{''.join(lines)}" for paper, lines in rows.items())


def replace_tables(page: str, tables: str) -> str:
    """Put the tables between `MARK` and `END`. Raises ConfigError for a page without them."""
    if MARK not in page or END not in page:
        raise ConfigError("FV2151", f"the page has no lines {MARK!r} and {END!r}, between which the tables are")
    before, after = page.split(MARK, 1)[0], page.split(END, 1)[1]
    return f"{before}{MARK}\n\n{tables}\n{END}{after}"


def list_loose_figures(page: str) -> list[str]:
    """List the accuracies that a page states outside of the written tables and of code."""
    text = re.sub(re.escape(MARK) + ".*?" + re.escape(END), "", page, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<![\d.])0\.\d{2,}", text)


def _render_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main(arguments: Sequence[str]) -> None:
    """Write the tables of README.md, and the page of kept results: their folder, and that of both pages."""
    folder, pages = map(Path, arguments)
    results = read_kept_results(folder)
    page = pages / "README.md"
    page.write_text(replace_tables(page.read_text(), render_verdicts(read_claims(folder), results)))
    (pages / PAGE).write_text(render_measured(results.values(), pages))


if __name__ == "__main__":
    main(sys.argv[1:])
