"""The pages as a browser shows them: nothing to complain about, and nothing that does not fit, on any screen."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.views.report.page import run_page
from fleet.experiments.report import html_report
from profiles.report.profile_page import profile_page
from tests.support.children import run_child
from tests.support.chromium import browsing, find_browser
from tests.support.reports import experiment_outcome, fleet_report, private_report, profile_document, run_report

WIDTHS = (1200, 768, 360)
"""A desk, a tablet, a telephone: CSS pixels."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--dump-dom",
)  # fmt: skip

HOST = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">
%s
<pre id="found"></pre>
<script>
const found = {};
addEventListener("load", () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, width = frame.clientWidth;
    for (const part of page.querySelectorAll("details")) part.open = true;
    const unsorted = [];
    for (const table of page.querySelectorAll("table.sortable")) {
      const heads = [...table.tHead.rows[0].cells];
      heads.forEach((head, place) => {
        head.firstElementChild.click();
        const cells = [...table.tBodies[0].rows].map(row => row.cells[place]);
        const known = cells.filter(cell => cell.textContent != "–");  // what was not measured is last
        if (known.some((cell, row) => cell != cells[row])) unsorted.push(head.textContent);
        const values = known.map(cell => "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent);
        const order = new Intl.Collator("en", {numeric: true}).compare;
        if (head.ariaSort != "ascending" || values.some((value, row) => row && (typeof value == "number"
            ? values[row - 1] > value : order(values[row - 1], value) > 0))) unsorted.push(head.textContent);
      });
      const field = page.querySelector(`input[data-filter="${table.id}"]`);
      field.value = table.tBodies[0].rows[0].cells[0].textContent.toUpperCase();
      field.dispatchEvent(new Event("input"));
      const shown = [...table.tBodies[0].rows].filter(row => !row.hidden);
      if (!shown.length || shown.some(row => !row.textContent.toUpperCase().includes(field.value)))
        unsorted.push("filter");
      field.value = "";
      field.dispatchEvent(new Event("input"));
    }
    const wide = [...page.body.querySelectorAll("*")].filter(
      part => !part.closest(".wide") && part.getBoundingClientRect().right > width + 1);
    const hidden = [...page.querySelectorAll(".chart .value, .chart .label")].filter(
      part => part.getBoundingClientRect().width < 8 && part.textContent);
    found[frame.title] = {
      unsorted: unsorted,
      scroll: page.documentElement.scrollWidth,
      wide: wide.map(part => part.outerHTML.slice(0, 120)),
      hidden: hidden.map(part => part.outerHTML.slice(0, 120)),
      bars: [...page.querySelectorAll(".track")].filter(part => part.clientWidth < 40).length,
      background: getComputedStyle(page.body).backgroundColor,
      ink: getComputedStyle(page.body).color,
    };
  }
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
"""
"""Shows a page in frames of several widths, which have no smallest size as windows do."""


PAGES: dict[str, Callable[[], str]] = {
    "profile": lambda: profile_page(profile_document()),
    "a profile of many variants": lambda: profile_page(
        profile_document(masks=(0.0, 0.25, 0.5, 0.75), splits=(1, 2, 4, 6))
    ),
    "a profile of one": lambda: profile_page(profile_document((("rpi5-8", None),), (0.75,), (2,))),
    "run": lambda: run_page(run_report()),
    "experiment": lambda: html_report(experiment_outcome()),
    "a run of many devices": lambda: run_page(fleet_report(60)),
    "a run with noise": lambda: run_page(private_report()),
    "a run without predictions": lambda: run_page(run_report(predicted=False)),
}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: make() for name, make in PAGES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_overflows_and_nothing_is_complained_about(pages: dict[str, str], tmp_path: Path, dark: bool) -> None:
    """Every page at every width, all of its parts opened. Tables wider than the screen scroll in their own box. In the
    dark, where colours alone are others, at one width."""
    widths = WIDTHS[:1] if dark else WIDTHS
    frames = [
        f'<iframe title="{name} at {width}" style="width: {width}px; height: 900px; border: 0" '
        f'srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in widths
    ]
    host = tmp_path / "host.html"
    host.write_text(HOST % "\n".join(frames))
    colours = ["--blink-settings=preferredColorScheme=0"] if dark else []
    shown = run_child(
        [find_browser(), *FLAGS, *colours, f"--user-data-dir={tmp_path / 'profile'}", host.as_uri()], check=True
    )
    complaints = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    said = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert said is not None, shown.stdout[-2000:]
    found = json.loads(html.unescape(said[1]))
    assert len(found) == len(PAGES) * len(widths)
    for frame, seen in found.items():
        width = int(frame.rpartition(" ")[2])
        assert seen["unsorted"] == [], frame
        assert seen["wide"] == [], frame
        assert seen["hidden"] == [], frame
        assert seen["bars"] == 0, frame
        assert seen["scroll"] <= width, frame
        # text and paper change places in the dark
        brightness = [sum(map(int, re.findall(r"\d+", seen[what])[:3])) for what in ("background", "ink")]
        assert (brightness[0] < brightness[1]) is dark, frame


@pytest.mark.slow
def test_page_is_accessible_by_the_rules_of_axe(pages: dict[str, str], tmp_path: Path) -> None:
    with browsing(tmp_path / "profile") as chromium, chromium.tab() as tab:
        tab.resize(WIDTHS[0])
        for name, page in pages.items():
            file = tmp_path / "page.html"
            file.write_text(page)
            tab.go(file.as_uri())
            tab.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true; })")
            assert tab.violations() == [], name
