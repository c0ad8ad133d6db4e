"""Verdicts on the papers' claims: kept results, the rule, and the tables of fleet/experiments/README.md.

`docs/results/` has a small file of each experiment that the page names (`fleet results NAME --keep docs/results`), and
`claims.toml`, which says what each paper claims and which figures answer it. `make verdicts` writes the tables.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from fedvit.errors import ConfigError, StorageFailed
from fedvit.files import atomic_write
from profiles.report.experiment import ExperimentOutcome, Interval

CLAIMS_FILE = "claims.toml"
MARK = "<!-- written by `make verdicts` from docs/results; change these files -->"
END = "<!-- end -->"
LEAST_SEEDS = 5
"""Seeds without which no measured difference is shown."""
_DIGITS = 4

Verdict = Literal["agrees", "contradicts", "not shown"]
_Kept = TypeVar("_Kept", "Claims", "KeptResults")


class KeptAccuracy(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A method's accuracy on a partition: the mean over devices, then over seeds."""

    method: str
    partition: str
    seeds: int
    mean: float
    interval: Interval | None = None  # None: a single seed
    generated_difference: float | None = None  # between devices' generated tensors; None: there is no generator
    at_edge: dict[str, str] = {}  # options whose best value is the "lowest" or "highest" that a search tried


class KeptDifference(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A method's accuracy minus that of the reference on the same partition and seeds."""

    method: str
    reference: str
    partition: str
    seeds: int
    mean: float
    interval: Interval | None = None  # None: a single seed

    def reverse(self) -> "KeptDifference":
        """Return the same difference from the reference's side."""
        interval = self.interval and Interval(-self.interval.high, -self.interval.low)
        return KeptDifference(
            method=self.reference, reference=self.method, partition=self.partition, seeds=self.seeds, mean=-self.mean,
            interval=interval,
        )  # fmt: skip


class KeptResults(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The figures of an experiment that outlive its folder."""

    experiment: str
    scale: str  # data, rounds
    accuracies: list[KeptAccuracy] = []
    differences: list[KeptDifference] = []

    def find_difference(self, method: str, reference: str, partition: str) -> KeptDifference:
        """Find a difference, in either direction. Raises ConfigError if it was not kept."""
        for one in self.differences:
            for entry in (one, one.reverse()):
                if (entry.method, entry.reference, entry.partition) == (method, reference, partition):
                    return entry
        raise ConfigError(
            "FV2151", f"{self.experiment}: no difference of {method} to {reference} on {partition} was kept"
        )

    def find_edge(self, difference: KeptDifference) -> str:
        """Say whose search ended at an edge, so that it may do better than in this difference; else return ''."""
        behind = difference.reference if difference.mean > 0 else difference.method
        for one in self.accuracies:
            if (one.method, one.partition) == (behind, difference.partition):
                return "; ".join(
                    f"{behind}'s best {option} is the {edge} tried" for option, edge in one.at_edge.items()
                )
        return ""


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


def keep_results(outcome: ExperimentOutcome) -> KeptResults:
    """Reduce results to means, intervals and differences to the reference."""
    settings = outcome.settings
    counts = f"{settings.get('devices')} devices, {settings.get('rounds')} rounds"
    edges = {(one.method, one.partition): one.at_edge for one in outcome.searches}
    return KeptResults(
        experiment=outcome.experiment,
        scale=f"{Path(str(settings.get('dataset', ''))).stem}, {counts}",
        accuracies=[
            KeptAccuracy(
                method=one.method, partition=one.partition, seeds=len(one.seeds), mean=round(one.accuracy, _DIGITS),
                interval=one.interval and _round(one.interval),
                generated_difference=one.generated_difference and round(one.generated_difference, _DIGITS),
                at_edge=edges.get((one.method, one.partition), {}),
            )
            for one in outcome.comparisons
        ],
        differences=[
            KeptDifference(
                method=one.method, reference=one.reference, partition=one.partition, seeds=len(one.seeds),
                mean=round(one.mean, _DIGITS), interval=_round(one.interval),
            )
            for one in outcome.differences
        ] + _list_single_differences(outcome),
    )  # fmt: skip


def _list_single_differences(outcome: ExperimentOutcome) -> list[KeptDifference]:
    """List the differences of a single seed, which have no interval."""
    accuracies = {
        (cell.method, cell.partition, cell.seed): cell.result.accuracy.mean for cell in outcome.cells if cell.result
    }
    return [
        KeptDifference(
            method=method, reference=outcome.reference, partition=partition, seeds=1,
            mean=round(accuracies[method, partition, seed] - accuracies[outcome.reference, partition, seed], _DIGITS),
        )
        for method, partition, seed in accuracies
        if method != outcome.reference
        and (outcome.reference, partition, seed) in accuracies
        and outcome.difference(method, partition) is None
    ]  # fmt: skip


def write_kept_results(outcome: ExperimentOutcome, folder: Path) -> Path:
    """Write the small file of an experiment. Raises StorageFailed."""
    file = folder / f"{outcome.experiment}.json"
    atomic_write(file, msgspec.json.format(msgspec.json.encode(keep_results(outcome)), indent=1) + b"\n")
    return file


def read_claims(folder: Path) -> Claims:
    """Read `CLAIMS_FILE`. Raises ConfigError, StorageFailed."""
    return _read(folder / CLAIMS_FILE, Claims)


def read_kept_results(folder: Path) -> dict[str, KeptResults]:
    """Read the kept results by experiment. Raises ConfigError, StorageFailed."""
    results = (_read(file, KeptResults) for file in sorted(folder.glob("*.json")))
    return {one.experiment: one for one in results}


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


def describe_difference(difference: KeptDifference) -> str:
    """
    >>> describe_difference(KeptDifference(method="a", reference="b", partition="p", seeds=1, mean=0.125))
    '+0.125'
    """
    interval = difference.interval
    return f"{difference.mean:+.3f}" + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval else "")


def replace_tables(page: str, tables: str) -> str:
    """Put the tables between `MARK` and `END`. Raises ConfigError for a page without them."""
    if MARK not in page or END not in page:
        raise ConfigError("FV2151", f"the page has no lines {MARK!r} and {END!r}, between which the tables are")
    before, after = page.split(MARK, 1)[0], page.split(END, 1)[1]
    return f"{before}{MARK}\n\n{tables}\n{END}{after}"


def list_figures(results: Iterable[KeptResults]) -> list[float]:
    """List all figures that were kept."""
    entries: list[KeptAccuracy | KeptDifference] = []
    for one in results:
        entries += [*one.accuracies, *one.differences]
    ends = [end for entry in entries if entry.interval for end in (entry.interval.low, entry.interval.high)]
    return [*(entry.mean for entry in entries), *ends]


def list_loose_figures(page: str) -> list[str]:
    """List the accuracies that a page states outside of the written tables and of code."""
    text = re.sub(re.escape(MARK) + ".*?" + re.escape(END), "", page, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"(?<![\d.])0\.\d{2,}", text)


def _read(file: Path, kind: type[_Kept]) -> _Kept:
    try:
        if file.suffix == ".toml":
            return msgspec.toml.decode(file.read_bytes(), type=kind)
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise StorageFailed("FV1701", f"cannot read {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError("FV2151", f"{file}: {error}") from None


def _round(interval: Interval) -> Interval:
    return Interval(round(interval.low, _DIGITS), round(interval.high, _DIGITS))


def _render_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main(arguments: Sequence[str]) -> None:
    """Write the tables of a page: the folder of kept results, and the page."""
    folder, page = map(Path, arguments)
    tables = render_verdicts(read_claims(folder), read_kept_results(folder))
    page.write_text(replace_tables(page.read_text(), tables))


if __name__ == "__main__":
    main(sys.argv[1:])
