"""The report of a fleet has the coordinator's part and the devices' logs, without secrets."""

from pathlib import Path

from click.testing import CliRunner

from fleet.cli import cli
from tests.support.planted import LINES, WORDS, find_planted, read_report
from tests.support.records import RUN, begin_run


def test_report_of_a_fleet(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs", tmp_path / "report.zip"
    store = begin_run(runs)
    store.runs.update(RUN, classes=["tabby", "siamese"])
    store.close()
    (runs / RUN / "devices").mkdir(parents=True)
    for number in range(3):
        (runs / RUN / "devices" / f"device-{number}.log").write_text(f"{LINES}trains on tabby\n")
    CliRunner().invoke(cli, ["bugreport", "--runs", str(runs), "--out", str(out)], catch_exceptions=False)
    files = read_report(out)
    assert {"show.json", "problems.json", *(f"run/devices/device-{number}.log" for number in range(3))} <= files.keys()
    assert find_planted(files, [*WORDS, "tabby", "siamese", str(tmp_path)]) == {}
