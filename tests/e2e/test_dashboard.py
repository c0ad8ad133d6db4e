"""The dashboard, as Chromium shows it, of a record that the store made: 500 devices, a round that is open."""

import socket
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
import pytest
from click.testing import CliRunner
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from coordinator.cli import cli
from coordinator.compute.planning.forecast import BoardForecast, Forecast, write_forecast
from coordinator.record.record import Record, open_record
from coordinator.rounds.status import read_members
from coordinator.security.broker.process import claim_port
from coordinator.security.folder import Deployment, Settings
from coordinator.security.registry import Certificate
from coordinator.views.dashboard.connections import MOST_OF_ONE_ADDRESS
from coordinator.views.dashboard.frame import clock
from fedvit.errors import FedvitError
from fedvit.resources import Budget, ResourceUse
from fedvit.wire.messages import ClassCount, Result
from tests.e2e.test_adoption import Terminal, read_code
from tests.support.chromium import Browser, Tab
from tests.support.dashboards import read_address, served
from tests.support.fleets import other_runs
from tests.support.models import BETTER, FIRST, WORSE, compare_on
from tests.support.programs import Stage, program
from tests.support.records import (
    FLEET_RUN,
    MARKUP,
    RUN,
    SUM_LINES,
    add_result,
    begin_run,
    expected,
    fleet_run,
    make_summed_run,
    write_members,
    write_status,
)
from tests.support.reports import experiment_outcome
from tests.support.waiting import WAIT_S, wait_until


def folder_of(record: Record) -> Path:
    assert record.database.file is not None
    return record.database.file.parent


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """Of two runs; the status of the larger one stays fresh, as if a coordinator served it."""
    folder = tmp_path_factory.mktemp("dashboard") / "runs"
    begin_run(folder).close()
    store, over = fleet_run(folder), threading.Event()

    def serve() -> None:
        while not over.wait(1.0):
            write_status(folder / FLEET_RUN)

    coordinator = threading.Thread(target=serve)
    coordinator.start()
    yield store
    over.set()
    coordinator.join()
    store.close()


def let_in(browser: Browser, folder: Path, address: str) -> None:
    """Open a dashboard without a password by its token; then all tabs of the browser have a session."""
    with browser.tab() as tab:
        tab.go(read_address(folder, address), "document.querySelector('#content')")
        assert tab.evaluate("location.href") == f"{address}/", "the token is in no address that the browser keeps"


@pytest.fixture(scope="module")
def address(record: Record, browser: Browser) -> Iterator[str]:
    experiments = folder_of(record).parent / "experiments"
    (experiments / "two").mkdir(parents=True)
    (experiments / "two" / "results.json").write_bytes(msgspec.json.encode(experiment_outcome()))
    (experiments / "broken").mkdir()
    (experiments / "broken" / "results.json").write_text("no outcome")
    with served(folder_of(record), "--experiments", str(experiments)) as address:
        let_in(browser, folder_of(record), address)
        yield address


def test_runs_are_listed_with_their_progress(tab: Tab, address: str) -> None:
    tab.go(f"{address}/runs", "document.querySelectorAll('#runs tbody tr').length == 2")
    rows = tab.rows("#runs")
    assert [row[0] for row in rows] == [f"{FLEET_RUN}\nfedavg on vit_tiny", f"{RUN}\neftvit on vit_small_images"]
    assert rows[0][1:3] == ["running", "4 of 8"]


def test_runs_are_searched_filtered_sorted_and_in_pages(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with open_record(folder) as store:
        other_runs(store, 120, rounds=1, devices=1)
    with served(folder) as address, browser.tab() as tab:
        let_in(browser, folder, address)
        tab.go(f"{address}/runs", "document.querySelectorAll('#runs tbody tr').length == 50")
        assert "1 to 50 of 120" in tab.text(".pages")
        tab.evaluate("[...document.querySelectorAll('.pages a')].at(-1).click()")
        tab.until("document.querySelector('.pages')?.innerText.includes('51 to 100 of 120')")
        tab.evaluate("[...document.querySelectorAll('#statuses a')].find(a => a.innerText.includes('failed')).click()")
        tab.until("document.querySelector('.pages')?.innerText.includes('1 to 15 of 15')")
        tab.evaluate("document.querySelector('#text').focus()")
        tab.write("fedavg")
        tab.press("Enter")
        tab.until("location.search.includes('text=fedavg') && document.querySelector('#nothing, #runs')")
        assert {row[1] for row in tab.rows("#runs")} <= {"failed"}
        tab.evaluate("document.querySelector('th.accuracy a')?.click()")
        assert tab.complaints == []


def test_run_shows_accuracy_with_spread_and_costs(tab: Tab, address: str) -> None:
    tab.go(f"{address}/run?run={FLEET_RUN}", "document.querySelectorAll('.figure svg').length == 6")
    tiles = tab.text("#tiles")
    assert "4 of 8" in tiles
    assert "500" in tiles
    newest = tab.rows("#rounds")
    assert [row[:2] for row in newest[:2]] == [["round 4", "250 of 500"], ["round 3", "500 of 500"]]
    assert newest[1][3:6] == ["0.200", "0.300", "0.900"], "spread over devices"
    assert newest[1][9:] == ["1.25 kJ", "23.0 s", "1.50 s"]
    assert tab.rows("#refusals")[0][:4] == ["3000", "7", "train", "a number is not finite <b>"]
    assert tab.rows("#plans")[0][:4] == ["as configured", "500", "512 MB", "400 MB"]


def test_run_follows_the_record_without_reload(tab: Tab, address: str, record: Record) -> None:
    tab.go(f"{address}/run?run={RUN}", "document.querySelector('#rounds')")
    tab.evaluate("window.same = true")
    assert tab.rows("#rounds")[0][:2] == ["round 2", "1 of 2"]
    add_result(record, "b", Result(RUN, 2, "train", 10, {"loss": 1.0}, ResourceUse(train_s=0.5)))
    tab.until("document.querySelector('#rounds tbody tr').cells[1].innerText == '2 of 2'")
    assert tab.evaluate("window.same") is True


# --- the front page -------------------------------------------------------------------------------------


def test_front_page_shows_the_fleet_and_what_runs(tab: Tab, address: str) -> None:
    tab.go(address, "document.querySelectorAll('.cell').length == 500")
    assert tab.text("#running").startswith(f"{FLEET_RUN}\n")
    assert "4 of 8" in tab.text("#running")
    assert "250 training" in tab.text("#legend")
    assert "1 quarantined" in tab.text("#legend")
    headings = tab.evaluate("[...document.querySelectorAll('h3')].map(one => one.innerText.split(' ')[0])")
    assert headings == ["north", "south"]
    problems = tab.text("#problems")
    assert f"coordinator start --resume {RUN}" in problems
    assert f"coordinator quarantine {FLEET_RUN} --release pi-3" in problems
    assert tab.evaluate("document.title") == "Fleet · fedvit"


def test_cells_of_devices_are_one_stop_of_the_keyboard(tab: Tab, address: str) -> None:
    tab.go(address, "document.querySelectorAll('.cell').length == 500")
    tab.evaluate("document.querySelector('.cell').focus()")
    tab.press("ArrowRight")
    assert tab.evaluate("document.activeElement.title").startswith("pi-2: ")
    assert tab.text(".readout").startswith("pi-2: ")
    tab.press("ArrowDown")
    assert tab.evaluate("document.activeElement.offsetTop > document.querySelector('.cell').offsetTop")
    assert tab.evaluate("document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1
    tab.press("Enter")
    tab.until("document.querySelector('#history')")


def test_front_page_keeps_the_focus_while_it_follows_the_record(tab: Tab, address: str, record: Record) -> None:
    tab.go(address, "document.querySelectorAll('.cell').length == 500")
    tab.send("Emulation.setFocusEmulationEnabled", enabled=True)  # as in a window that its user looks at
    tab.evaluate("document.querySelectorAll('.cell')[5].focus(); window.before = document.activeElement")
    record.strikes.add_quarantine(FLEET_RUN, "pi-2", 4, None, "two strikes")
    try:
        tab.until("document.querySelector('#legend').innerText.includes('2 quarantined')")
        tab.until("!window.before.isConnected && document.activeElement.title == window.before.title")
    finally:
        record.strikes.release(FLEET_RUN, "pi-2")


def test_front_page_of_an_empty_folder_says_what_to_type(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    open_record(folder).close()
    with served(folder) as address, browser.tab() as tab:
        let_in(browser, folder, address)
        tab.go(address, "document.querySelector('#empty')")
        assert "coordinator init" in tab.text("#empty")
        assert "coordinator serve" in tab.text("#empty")
        assert "Nothing needs you." in tab.text("#no-problems")
        check_every_screen(tab, "empty fleet", "document.querySelector('#empty')")
        for page, shown in (
            ("/runs", "no run yet"), ("/devices", "no run yet"), ("/service", "no service runs"),
            ("/models", "No model yet"),
        ):  # fmt: skip
            tab.go(f"{address}{page}", f"document.body.innerText.includes('{shown}')")


# --- the devices of a run ------------------------------------------------------------------------------------------

ROWS = "[...document.querySelectorAll('.grid .ag-center-cols-container .ag-row')]"
NAMES = "[...document.querySelectorAll('.grid .ag-pinned-left-cols-container .ag-row a')].map(a => a.textContent)"


def test_fleet_has_every_device_and_shows_names_as_text(tab: Tab, address: str) -> None:
    tab.go(f"{address}/devices?run={FLEET_RUN}", f"{NAMES}.length > 5")
    assert tab.evaluate("document.querySelector('.grid [role=grid], .grid [role=treegrid]').ariaRowCount") == "502"
    assert tab.evaluate(NAMES)[0] == MARKUP
    assert tab.evaluate("document.title") == "Devices · fedvit"
    assert "500 devices" in tab.text("#count")
    assert "1 in quarantine" in tab.text("#count")
    first = tab.evaluate(f"{ROWS}[0].innerText")
    for shown in ("online", "Raspberry Pi 5", "site=north"):
        assert shown in first


def test_fleet_is_filtered_and_sorted_by_keyboard(tab: Tab, address: str) -> None:
    tab.go(f"{address}/devices?run={FLEET_RUN}", f"{NAMES}.length > 5")
    tab.evaluate("document.querySelector('.search input').focus()")
    tab.write("in quarantine")
    tab.until(f"{NAMES}.join() == 'pi-3'")
    tab.evaluate("document.querySelector('.search input').select()")
    tab.write("pi-49")
    tab.until(f"{NAMES}.length == 11")
    tab.press("Tab")
    for _ in range(4):  # a button that empties the filter may lie between
        if tab.evaluate("document.activeElement.classList.contains('ag-header-cell')"):
            break
        tab.press("Tab")
    assert tab.evaluate("document.activeElement.ariaSort") == "ascending"
    assert tab.evaluate(NAMES)[0] == "pi-49"
    tab.press("Enter")
    tab.until(f"{NAMES}[0] == 'pi-499'")
    assert tab.evaluate("document.activeElement.ariaSort") == "descending"


def test_fleet_follows_the_record_without_reload(tab: Tab, address: str, record: Record) -> None:
    tab.go(f"{address}/devices?run={FLEET_RUN}", f"{NAMES}.length > 5")
    tab.evaluate("document.querySelector('.search input').focus()")
    tab.write("pi-2")
    tab.until(f"{NAMES}[0] == 'pi-2'")
    record.strikes.add_quarantine(FLEET_RUN, "pi-2", 4, None, "two strikes")
    try:
        tab.until(f"{ROWS}[0].innerText.includes('in quarantine')")
    finally:
        record.strikes.release(FLEET_RUN, "pi-2")


@pytest.mark.slow
def test_device_shows_its_history(tab: Tab, address: str) -> None:
    tab.go(f"{address}/device?run={FLEET_RUN}&device=pi-3", "document.querySelectorAll('.figure svg').length == 4")
    rows = tab.rows("#history")
    assert [row[:2] for row in rows] == [[f"round {number}", "accepted"] for number in (4, 3, 2, 1)]
    assert rows[1][2] == "0.600"
    assert rows[1][5:] == ["4.00 ms", "10.3 ms", "300 MB", "512 MB", "43.0 °C", "no", "2.50 J", "100 kB"]
    assert "Raspberry Pi 4, 4 cores" in tab.text("#member")
    assert "Online since" in tab.text("#member")
    assert "In quarantine" in tab.text()
    assert "a number is not finite <b>" in tab.text("#refusals")


@pytest.mark.slow
def test_device_of_a_run_that_nobody_serves_is_not_online(browser: Browser, tmp_path: Path) -> None:
    """Its coordinator was killed: the files say that the device is online, and are old."""
    begin_run(tmp_path / "runs").close()
    write_members(tmp_path / "runs" / RUN, ["a"])
    with served(tmp_path / "runs") as address, browser.tab() as tab:
        let_in(browser, tmp_path / "runs", address)
        tab.go(f"{address}/device?run={RUN}&device=a", "document.querySelector('#member')")
        assert "Online since" not in tab.text("#member")
        [member] = read_members(tmp_path / "runs" / RUN)
        assert f"Last seen {clock(member.seen)} UTC" in tab.text("#member")
        tab.go(f"{address}/devices?run={RUN}", f"{NAMES}.length > 0")
        assert clock(member.seen) in tab.evaluate(f"{ROWS}[0].innerText + document.body.innerText")


@pytest.mark.slow
def test_device_of_a_name_with_markup_has_its_page(tab: Tab, address: str) -> None:
    tab.go(f"{address}/devices?run={FLEET_RUN}", f"{NAMES}.length > 5")
    tab.evaluate("document.querySelector('.grid .ag-pinned-left-cols-container .ag-row[row-index=\"0\"] a').click()")
    tab.until("document.querySelector('#history')")
    assert tab.text("h1") == MARKUP
    assert tab.evaluate("document.images.length") == 0


# --- one round ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_round_shows_its_tasks_on_one_scale(tab: Tab, address: str) -> None:
    tab.go(f"{address}/round?run={FLEET_RUN}&number=4", "document.querySelector('#timeline')")
    rows = tab.rows("#timeline")
    assert len(rows) == 500
    assert [row[1] for row in rows].count("working") == 250, "those under way first"
    assert rows[0][1] == "working"
    assert rows[-1][1] == "accepted"
    widths = tab.evaluate("[...document.querySelectorAll('.timeline i')].map(i => i.style.left + ' ' + i.style.width)")
    assert all(width.count("%") == 2 for width in widths)


@pytest.mark.slow
def test_round_lists_what_was_refused_with_reasons(tab: Tab, address: str) -> None:
    tab.go(f"{address}/round?run={FLEET_RUN}&number=1", "document.querySelector('#refusals')")
    rows = tab.rows("#refusals")
    assert len(rows) == 200, "the newest of a thousand"
    assert rows[0][3] == "a number is not finite <b>"


# --- runs side by side ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_are_compared(tab: Tab, address: str) -> None:
    tab.go(f"{address}/compare")
    tab.evaluate("document.querySelectorAll('input[name=run]').forEach(box => box.click())")
    tab.evaluate("document.querySelector('form button').click()")
    tab.until("document.querySelectorAll('.figure svg').length == 4")
    differing = {row[0]: row[1:] for row in tab.rows("#differing")}
    assert differing["method"] == ["fedavg", "eftvit"]
    assert differing["lr"] == ["0.5", "default"]
    assert ["rounds", "4 of 8", "2 of 3"] in tab.rows("#compared")


@pytest.mark.slow
def test_methods_of_an_experiment_are_compared_with_a_run(tab: Tab, address: str) -> None:
    """Of each, three rounds of two devices, with 2 MB down and 1 MB up: 6 MB a round."""
    tab.go(f"{address}/compare?run={RUN}")
    names = tab.evaluate("[...document.querySelectorAll('input[name=method]')].map(box => box.value)")
    methods = [
        "two/fedavg/even",
        "two/fedavg/dirichlet-0.1-over-twenty-devices",
        "two/a-method-with-quite-a-long-name/even",
    ]
    assert names == methods, "those of which a seed is finished"
    tab.evaluate("[...document.querySelectorAll('input[name=method]')].slice(0, 2).forEach(box => box.click())")
    tab.evaluate("document.querySelector('form button').click()")
    tab.until("document.querySelectorAll('#compared thead th').length == 4")
    tab.until("document.querySelectorAll('.figure svg').length == 4")
    rows = {row[0]: row[1:] for row in tab.rows("#compared")}
    assert rows["status"] == ["running", "1 of 1 seeds", "1 of 1 seeds"]
    assert rows["rounds"] == ["2 of 3", "3 of 3", "3 of 3"]
    assert rows["accuracy"][1:] == ["0.900", "0.900"]
    assert rows["sent down"][1:] == ["12.0 MB", "12.0 MB"]
    assert rows["energy"][1:] == ["–", "–"]
    differing = {row[0]: row[1:] for row in tab.rows("#differing")}
    assert differing["partition.name"] == ["default", "even", "dirichlet-0.1-over-twenty-devices"]


def test_experiment_that_is_gone_is_said_in_the_page(tab: Tab, address: str) -> None:
    tab.go(f"{address}/compare?method=gone/fedavg/iid", "document.querySelector('[role=alert]')")
    assert "no results of gone/fedavg/iid" in tab.text("[role=alert]")


# --- before a run ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_queued_run_shows_plans_of_boards(browser: Browser, tmp_path: Path) -> None:
    """First the command that makes them, then what it wrote, without a reload."""
    folder = tmp_path / "runs"
    with open_record(folder) as store:
        store.runs.submit("night", {"method": "fedavg", "model": "vit_tiny", "rounds": 4})
    forecast = Forecast(
        at="2026-11-22T09:00:00+00:00", images=500, test_images=100,
        boards=[
            BoardForecast(
                board="rpi5-8", budget=Budget(memory_bytes=512_000_000), expected=expected("rpi5-8"), refused=None
            ),
            BoardForecast(
                board="rpi-zero2w", budget=Budget(memory_bytes=10**6), expected=None, refused="<b>nothing</b> fits"
            ),
        ],
    )  # fmt: skip
    with served(folder) as address, browser.tab() as tab:
        let_in(browser, folder, address)
        tab.go(f"{address}/run?run=night", "document.querySelector('#no-forecast')")
        assert "coordinator plan --run night --device BOARD" in tab.text("#no-forecast")
        write_forecast(folder / "night", forecast)
        tab.until("document.querySelector('#forecast')")
        fits, refused = tab.rows("#forecast")
        assert fits == [
            "rpi5-8", "as configured", "400 MB", "512 MB", "20.0 ms", "8.00 s", "8.00 s", "1.00 GFLOP", "1.00 MB",
            "100 kB", "–", "100 %",
        ]  # fmt: skip
        assert refused[:2] == ["rpi-zero2w", "Refused. <b>nothing</b> fits"]
        check_every_screen(tab, "queued run", "document.querySelector('#forecast')")
        assert tab.evaluate("document.querySelectorAll('.figure').length") == 0, "no chart is empty"
        assert tab.complaints == []


@pytest.mark.slow
def test_run_shows_its_secure_sums(browser: Browser, tmp_path: Path) -> None:
    make_summed_run(tmp_path).close()
    with served(tmp_path) as address, browser.tab() as tab:
        let_in(browser, tmp_path, address)
        tab.go(f"{address}/run?run={RUN}", "document.querySelectorAll('#sums li').length == 2")
        lines = tab.evaluate("[...document.querySelectorAll('#sums li')].map(line => line.innerText)")
        assert lines == SUM_LINES


def test_run_shows_accuracy_by_class(browser: Browser, tmp_path: Path) -> None:
    """The lowest first; 9 of 10 ants by one device, 12 of 20 bees by two; what was answered in the order of classes."""
    folder = tmp_path / "runs"
    with closing(begin_run(folder)) as store:
        for name, by_class in (
            ("a", (ClassCount(0, 9, 10, ((1, 1),)), ClassCount(1, 5, 10, ((0, 5),)))),
            ("b", (ClassCount(1, 7, 10, ((0, 3),)),)),
        ):
            store.tasks.drop_result(RUN, 1, "evaluate", name)
            samples, right = (sum(getattr(one, key) for one in by_class) for key in ("images", "correct"))
            metrics = {"correct": float(right)}
            add_result(store, name, Result(RUN, 1, "evaluate", samples, metrics, ResourceUse(), by_class=by_class))
    with served(folder) as address, browser.tab() as tab:
        let_in(browser, folder, address)
        tab.go(f"{address}/run?run={RUN}", "document.querySelector('#classes')")
        assert tab.rows("#classes") == [["bee", "0.600", "20", "2", "ant 8"], ["ant", "0.900", "10", "1", "bee 1"]]
        assert tab.rows(".confusion") == [["ant", "9", "1"], ["bee", "8", "12"]]
        tab.until("document.querySelectorAll('.figure svg').length == 5")
        check_every_screen(tab, "run with classes", "document.querySelector('#classes')")


# --- every page, on every screen ------------------------------------------------------------------------

LOOK = """(() => {
  const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const behind = part => {
    const layers = [];
    for (let one = part; one; one = one.parentElement) layers.push(rgba(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((below, [r, g, b, a]) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]),
      [255, 255, 255]);
  };
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(
    c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4).reduce(
    (sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const faint = new Set(), texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const part = texts.currentNode.parentElement, style = getComputedStyle(part);
    if (!texts.currentNode.textContent.trim() || !part.checkVisibility({visibilityProperty: true})) continue;
    if (['SCRIPT', 'STYLE', 'TITLE'].includes(part.tagName) || !part.getBoundingClientRect().width) continue;
    if (part.closest('[aria-hidden=true], .nicegui-error-popup, #esm-fallback')) continue;
    const below = behind(part), [r, g, b, a] = rgba(part.closest('svg') ? style.fill : style.color);
    const ink = [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
    const [low, high] = [light(ink), light(below)].sort((x, y) => x - y);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) faint.add(ratio.toFixed(2) + ' ' + part.outerHTML.slice(0, 100));
  }
  const width = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll('main *, header *')].filter(
    part => !part.closest('.wide, .grid, svg, .skip')
    && !part.parentElement.closest('.wide') && part.getBoundingClientRect().right > width + 1);
  return {
    faint: [...faint], wide: wide.map(part => part.outerHTML.slice(0, 120)),
    scroll: document.documentElement.scrollWidth, width,
    dark: light(rgba(getComputedStyle(document.body).backgroundColor)) < 0.5,
    language: document.documentElement.lang,
  };
})()"""
"""What does not fit, and texts that are too faint for WCAG AA."""

NAMED_ROLES = {
    "button",
    "link",
    "textbox",
    "searchbox",
    "checkbox",
    "combobox",
    "img",
    "image",
    "region",
    "columnheader",
}
PAGES = {
    "front": ("/", "document.querySelectorAll('.cell').length == 500"),
    "runs": ("/runs", "document.querySelector('#runs')"),
    "service": ("/service", "document.querySelector('#service')"),
    "run": (f"/run?run={FLEET_RUN}", "document.querySelectorAll('.figure svg').length == 6"),
    "devices": (f"/devices?run={FLEET_RUN}", f"{NAMES}.length > 5"),
    "device": (f"/device?run={FLEET_RUN}&device=pi-3", "document.querySelectorAll('.figure svg').length == 4"),
    "round": (f"/round?run={FLEET_RUN}&number=3", "document.querySelector('#timeline')"),
    "compare": (
        f"/compare?run={FLEET_RUN}&run={RUN}&method=two/fedavg/even",
        "document.querySelectorAll('.figure svg').length == 4",
    ),
}
WIDTHS = (1200, 768, 360)


def fitting(tab: Tab, width: int, shown: str, where: str) -> dict[str, Any]:
    """What is seen of the page when all of it fits the screen: charts take the new size after the page has, and on a
    busy machine the page may have lost its connection, and is loaded anew."""
    seen: dict[str, Any] = {}

    def fits() -> bool:
        seen.update(tab.evaluate(f"document.body && {shown} ? {LOOK} : null") or {"wide": ["no page"]})
        return seen["wide"] == [] and seen["scroll"] <= width

    wait_until(fits, lambda: f"{where}: {seen}")
    return seen


def check_every_screen(tab: Tab, page: str, shown: str) -> None:
    tab.remove_alike()
    for width in WIDTHS:
        for dark in (False, True):
            tab.resize(width, dark=dark)
            tab.until(f"document.documentElement.clientWidth == {width}")
            tab.until(f"document.body.classList.contains('body--dark') == {str(dark).lower()}")
            where = f"{page} at {width}, {'dark' if dark else 'light'}"
            seen = fitting(tab, width, shown, where)
            assert seen["faint"] == [], where
            assert seen["dark"] is dark, where
            assert seen["language"] == "en-US"
    names = tab.accessible()
    assert [role for role, name in names if role in NAMED_ROLES and not name.strip()] == []
    assert [role for role, _ in names].count("main") == 1
    assert tab.violations() == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_fits_every_screen_with_contrast_and_names(tab: Tab, address: str, page: str) -> None:
    path, shown = PAGES[page]
    tab.go(address + path, shown)
    check_every_screen(tab, page, shown)


def test_keyboard_reaches_the_content_and_the_links(tab: Tab, address: str) -> None:
    tab.go(f"{address}/runs", "document.querySelector('#runs')")
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    tab.press("Enter")
    for _ in range(12):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.textContent") == FLEET_RUN:
            break
    assert tab.evaluate("document.activeElement.textContent") == FLEET_RUN
    tab.press("Enter")
    tab.until("document.querySelector('#tiles')")


# --- what goes wrong ------------------------------------------------------------------------------------


def start_refused(folder: Path, *flags: str, password: str | None = None) -> str:
    """What a dashboard says that does not start."""
    given = ["dashboard", "--runs", str(folder), *flags]
    done = CliRunner(env={"FEDVIT_DASHBOARD_PASSWORD": password}).invoke(cli, given)
    assert isinstance(done.exception, FedvitError), (done.output, done.exception)
    assert done.exception.exit_code == 2
    assert done.output == ""
    said = str(done.exception)
    assert "\n" not in said
    return said


def test_port_in_use_is_one_line(record: Record, address: str) -> None:
    port = address.rpartition(":")[2]
    assert f"port {port} on 127.0.0.1 is in use" in start_refused(folder_of(record), "--port", port)


@pytest.mark.slow
def test_record_that_another_version_takes_over_is_said_in_the_page(tab: Tab, browser: Browser, tmp_path: Path) -> None:
    begin_run(tmp_path / "runs").close()
    file = tmp_path / "runs" / "fedvit.db"
    with served(file.parent) as address:
        let_in(browser, file.parent, address)
        tab.go(f"{address}/runs", "document.querySelector('#runs')")
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("ALTER TABLE runs RENAME TO later")
        tab.until("document.querySelector('[role=alert]')?.innerText.includes('no such table')")
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("ALTER TABLE later RENAME TO runs")
        tab.until("!document.querySelector('[role=alert]')")
        assert RUN in tab.text("#runs")


def test_page_of_an_unknown_run_says_so(tab: Tab, address: str) -> None:
    tab.go(f"{address}/run?run=<b>x</b>", "document.querySelector('[role=alert]')")
    assert "no run '<b>x</b>'" in tab.text("[role=alert]")


def test_browser_that_leaves_in_the_middle_changes_nothing(browser: Browser, address: str) -> None:
    """A request that is cut off, and a page that is closed while it is made; the next one is as always."""
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as cut:
        cut.sendall(f"GET /devices?run={FLEET_RUN} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    with browser.tab() as left:
        left.send("Page.navigate", url=f"{address}/run?run={FLEET_RUN}")
    with browser.tab() as tab:
        tab.go(address, "document.querySelector('#running')")


def test_dashboard_beyond_this_machine_needs_a_password(record: Record, tmp_path: Path) -> None:
    assert "needs a password" in start_refused(folder_of(record), "--listen", "0.0.0.0")
    assert "fewer than 8 characters" in start_refused(folder_of(record), "--listen", "0.0.0.0", password="short")
    secret = tmp_path / "password"
    assert "cannot be read" in start_refused(folder_of(record), "--password-file", str(secret))


def test_request_under_a_foreign_name_is_refused(address: str) -> None:
    for headers in (
        {"Host": "elsewhere.example"},
        {"Origin": "http://elsewhere.example"},
        {"Origin": "http://["},
        {"Host": "["},
    ):
        asked = urllib.request.Request(address, headers=headers)
        with pytest.raises(urllib.error.HTTPError, check=lambda error: error.code == 403):
            urllib.request.urlopen(asked, timeout=WAIT_S)


def status_of(address: str, **headers: str) -> tuple[int, str]:
    """Status and text of the answer, by a client without a session."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_user_of_the_same_machine_sees_nothing_without_the_token(record: Record, address: str) -> None:
    for page in ("/", "/devices", f"/run?run={FLEET_RUN}"):
        status, text = status_of(address + page)
        assert status == 200
        assert "Token of this dashboard" in text
        assert FLEET_RUN not in text
    with pytest.raises(InvalidStatus, check=lambda error: error.response.status_code == 403):
        connect(f"ws{address[4:]}/_nicegui_ws/socket.io/?EIO=4&transport=websocket").close()
    [file] = [file for file in folder_of(record).glob("dashboard-*.url") if address in file.read_text()]
    assert file.stat().st_mode & 0o777 == 0o600
    assert status_of(f"{address}/?token=wrong")[0] == 403


def test_markup_of_a_peer_that_reached_a_page_would_run_no_script(tab: Tab, address: str) -> None:
    """The policy refuses handlers and scripts that the server did not write into the page."""
    tab.go(address, "document.querySelector('#running')")
    tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">');"
        "const one = document.createElement('script'); one.textContent = 'window.ran = 2'; document.body.append(one)"
    )
    tab.until("[...document.images].at(-1).complete")
    assert tab.evaluate("window.ran ?? null") is None
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


def test_answers_have_the_headers_that_protect_a_browser(address: str) -> None:
    with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
        headers = answer.headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


@pytest.mark.slow
def test_connections_that_send_nothing_whole_are_closed(record: Record, address: str) -> None:
    """More than a client may have are refused; those that begin a request and do not end it are closed."""
    port = int(address.rpartition(":")[2])
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MOST_OF_ONE_ADDRESS + 5)
        ]
        for link in slow:
            link.settimeout(WAIT_S)
            with suppress(OSError):
                link.sendall(b"GET / HTTP/1.1\r\nHost: ")
        for link in slow:
            with suppress(ConnectionError):
                assert link.recv(1) == b""
    assert status_of(address)[0] == 200


# --- with a password ------------------------------------------------------------------------------------

PASSWORD = "a password of eight"


def sign_in(tab: Tab, address: str, password: str) -> None:
    tab.go(address, "document.querySelector('#password')")
    tab.evaluate("document.querySelector('#password').focus()")
    tab.write(password)
    tab.press("Enter")


def choose(tab: Tab, button: str) -> None:
    """Press a button of the page, and answer its question with yes."""
    found = "[...document.querySelectorAll('button')].find(one => one.innerText.toLowerCase() == '%s')"
    tab.until(f"!({found % 'yes'})")  # an earlier question stays for a moment while it closes
    tab.until(f"(({found % button.lower()}).click(), true)")
    tab.until(f"(({found % 'yes'}).click(), true)")


def test_operator_with_the_password_acts_as_by_the_commands(browser: Browser, tmp_path: Path) -> None:
    """Cancel a run, release a device from quarantine, revoke another, each as its command does."""
    store = begin_run(tmp_path / "runs")
    store.strikes.add(RUN, 1, "a", "a number is not finite")
    store.strikes.add_quarantine(RUN, "a", 1, None, "1 strike")
    deployment = Deployment.create(tmp_path / "deployment", Settings(
        federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost",)))  # fmt: skip
    with deployment.change() as rows:
        rows.put_device("a", Certificate("1f", 0.0, 1e12), 0.0)
    flags = ("--deployment", str(deployment.folder))
    with served(tmp_path / "runs", *flags, password=PASSWORD) as address, browser.tab() as tab:
        sign_in(tab, address, "another password")
        tab.until("document.querySelector('[role=alert]').innerText == 'The password is wrong.'")
        sign_in(tab, address, PASSWORD)
        tab.until("document.querySelector('#numbers')")
        tab.go(f"{address}/device?run={RUN}&device=a", "document.querySelector('#tiles')")
        choose(tab, "Release from quarantine")
        tab.until("document.body.innerText.includes('a: released, its strikes are reset')")
        assert store.strikes.read_current_quarantines(RUN, 2) == {}
        tab.evaluate("document.querySelector('.search input').focus()")
        tab.write("site=berlin")
        choose(tab, "Set labels")
        tab.until("document.body.innerText.includes('a: labels site=berlin')")
        assert store.devices.read_labels() == {"a": {"site": "berlin"}}
        choose(tab, "Revoke")
        tab.until("document.body.innerText.includes('a is revoked')")
        with deployment.registry.read() as rows:
            assert rows.revocations.list_devices() == ["a"]
        tab.go(f"{address}/run?run={RUN}", "document.querySelector('#tiles')")
        choose(tab, "Pause")
        tab.until("document.querySelector('#paused')")
        assert store.runs.is_paused(RUN)
        choose(tab, "End the pause")
        tab.until("!document.querySelector('#paused')")
        assert not store.runs.is_paused(RUN)
        choose(tab, "Cancel this run")
        tab.until("document.querySelector('.state').innerText == 'cancelled'")
        assert store.runs.read(RUN).status == "cancelled"
        shown = "[...document.querySelectorAll('main button')].filter(one => one.checkVisibility()).length"
        tab.until(f"{shown} == 0")
    store.close()


def test_operator_changes_models_from_their_page(browser: Browser, tmp_path: Path) -> None:
    """Only the buttons that apply are there; each does what its command does."""
    store = begin_run(tmp_path / "runs")
    for name, compared in (("r-1", FIRST), ("r-2", BETTER), ("r-3", WORSE)):
        compare_on(store, name, {"a": compared, "b": compared}, after=0)
    with served(tmp_path / "runs", password=PASSWORD) as address, browser.tab() as tab:
        sign_in(tab, address, PASSWORD)
        tab.until("document.querySelector('#numbers')")
        tab.go(f"{address}/models", "document.querySelectorAll('#models tbody tr').length == 3")
        assert "0.900 against 0.650 on 200 images" in tab.text("#models")
        check_every_screen(tab, "models", "document.querySelector('#models')")
        tab.resize(1200, dark=False)
        tab.go(f"{address}/model?model=r-2", "document.querySelector('#devices') && document.querySelector('#history')")
        check_every_screen(tab, "model", "document.querySelector('#history')")
        tab.resize(1200, dark=False)
        shown = "[...document.querySelectorAll('main button')].filter(one => one.checkVisibility()).length"
        tab.until(f"{shown} == 2")
        choose(tab, "Roll back")
        tab.until("document.body.innerText.includes('model r-2 is rolled back on 2 devices')")
        tab.until(f"{shown} == 0")
        assert store.models.read("r-2").stage == "retired"
        tab.go(f"{address}/model?model=r-3", "document.querySelector('#history')")
        choose(tab, "Promote")
        tab.until("document.body.innerText.includes('model r-3 becomes champion on 2 devices')")
        assert store.audit.read()[-1].act == "promote model"
        assert store.audit.read()[-1].origin.startswith("dashboard")
    store.close()


def press(tab: Tab, button: str) -> None:
    tab.until(
        f"(([...document.querySelectorAll('main button')].find(one => one.innerText.toLowerCase() == "
        f"'{button.lower()}').click(), true))"
    )


def test_operator_submits_a_run_from_the_page(browser: Browser, tmp_path: Path) -> None:
    """A run that is queued, and then mistakes, which are shown by key."""
    store = begin_run(tmp_path / "runs")
    with served(tmp_path / "runs", password=PASSWORD) as address, browser.tab() as tab:
        sign_in(tab, address, PASSWORD)
        tab.until("document.querySelector('#numbers')")
        tab.go(f"{address}/submit", "document.querySelector('textarea')")
        press(tab, "Check only")
        tab.until("document.querySelector('#checked')")

        def submit(text: str) -> None:
            tab.evaluate("document.querySelector('textarea').focus(), document.querySelector('textarea').select()")
            tab.write(text)
            tab.until(f"document.querySelector('textarea').value == {text!r}")
            press(tab, "Submit")

        submit('method = "fedavg"\nrounds = 4\n')
        tab.until("document.querySelector('#submitted')")
        [queued] = [record for record in store.runs.read_all() if record.status == "queued"]
        assert queued.config["rounds"] == 4
        assert queued.id in tab.text("#submitted")
        submit("rounds = -1\ndevics = 1\n")
        tab.until("document.querySelector('#errors')")
        assert [row[0] for row in tab.rows("#errors")] == ["devics", "rounds"]
        check_every_screen(tab, "submit", "document.querySelector('#errors')")
        assert tab.complaints == []
    store.close()


def test_administrator_enrols_a_device_from_the_page(browser: Browser, tmp_path: Path) -> None:
    """The token is shown once, and its device is in the fleet with its site only after it has joined."""
    store = begin_run(tmp_path / "runs")
    deployment = Deployment.create(tmp_path / "deployment", Settings(
        federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost",)))  # fmt: skip
    flags = ("--deployment", str(deployment.folder))
    with served(tmp_path / "runs", *flags, password=PASSWORD) as address, browser.tab() as tab:
        sign_in(tab, address, PASSWORD)
        tab.until("document.querySelector('#numbers')")
        tab.go(f"{address}/enrol", "document.querySelector('input[aria-label=\"Name of the device\"]')")
        write_into(tab, "Name of the device", "pi-7")
        write_into(tab, "Labels, as in site=berlin board=rpi5", "site=berlin")
        press(tab, "Make a token")
        tab.until("document.querySelector('#token')")
        assert "edge-client join fedvit" in tab.text("#token")
        check_every_screen(tab, "enrol", "document.querySelector('#token')")
        with deployment.registry.read() as rows:
            assert [token.device for token in rows.tokens.read_all()] == ["pi-7"]
        assert store.devices.read_labels() == {"pi-7": {"site": "berlin"}}
        tab.go(f"{address}/service", "document.querySelector('#certificates')")
        assert "Authority" in tab.text("#certificates")
        assert tab.complaints == []
    store.close()


@pytest.mark.slow
def test_administrator_adopts_a_device_from_the_page(browser: Browser, stage: Stage, tmp_path: Path) -> None:
    """A real device asks; a wrong code does not admit it, the right one does, and it gets its certificate."""
    begin_run(tmp_path / "runs").close()
    settings = Settings(
        federation="home", listen="127.0.0.1", port=claim_port(), enrolment_port=claim_port(),
        hosts=("localhost", "127.0.0.1"),
    )  # fmt: skip
    deployment = Deployment.create(tmp_path / "deployment", settings)
    place, state = f"127.0.0.1:{claim_port()}", stage.folder / "state" / "pi-3"
    flags = ("--deployment", str(deployment.folder))
    serving = Terminal([*program("coordinator.cli"), "enroll", "pi-9", *flags], stage)
    serving.wait_for("waiting for it")
    with served(tmp_path / "runs", *flags, password=PASSWORD) as address, browser.tab() as tab:
        sign_in(tab, address, PASSWORD)
        tab.until("document.querySelector('#numbers')")
        tab.go(f"{address}/enrol", "document.querySelector('input[aria-label=\"Address at which devices may ask\"]')")
        write_into(tab, "Address at which devices may ask", place)
        press(tab, "Let devices ask")
        tab.until(f"document.querySelector('#open').innerText.includes({place!r})")
        join = ("join", "--id", "pi-3", "--state", str(state), "--from", place, "--patience", f"{WAIT_S}s")
        joining = Terminal([*program("edge_client.cli"), *join], stage)
        code = read_code(joining)
        tab.until("document.querySelector('#asking').innerText.includes('pi-3')")
        check_every_screen(tab, "adopt", "document.querySelector('#asking')")
        write_into(tab, "Code on the screen of the device", f"{(int(code.replace(' ', '')) + 1) % 10**6:06d}")
        press(tab, "Admit")
        tab.until("document.querySelector('#not-adopted').innerText.includes('is not the code of pi-3')")
        write_into(tab, "Code on the screen of the device", code)
        press(tab, "Admit")
        tab.until("document.querySelector('#adopted').innerText.includes('pi-3 may join')")
        joining.wait_for("is right?")
        joining.type("y")
        assert joining.finish() == 0, joining.text
        press(tab, "Let no device ask")
        tab.until("document.querySelector('#closed')")
        assert tab.complaints == []
    serving.close()
    with deployment.registry.read() as rows:
        assert rows.find_device("pi-3") is not None
    assert (state / "identity" / "membership.json").is_file()


def write_into(tab: Tab, label: str, text: str) -> None:
    """Replace the text of a field, and wait until the page has it."""
    field = f"document.querySelector('input[aria-label=\"{label}\"]')"
    tab.evaluate(f"({field}.focus(), {field}.select())")
    tab.write(text)
    tab.until(f"{field}.value == {text!r}")


def test_nothing_is_shown_without_the_password(browser: Browser, record: Record) -> None:
    with served(folder_of(record), password=PASSWORD) as address:
        with urllib.request.urlopen(f"{address}/devices", timeout=WAIT_S) as answer:
            text = answer.read().decode()
        assert "Password of this dashboard" in text
        with browser.tab() as tab:
            tab.go(address, "document.querySelector('#password')")
            assert tab.violations() == []
        assert "pi-1" not in text
        with pytest.raises(InvalidStatus, check=lambda error: error.response.status_code == 403):
            connect(f"ws{address[4:]}/_nicegui_ws/socket.io/?EIO=4&transport=websocket").close()


def enter(address: str, password: str, **headers: str) -> tuple[int, str]:
    """Status and cookie after a form with a password."""
    target = urlsplit(address)
    link = HTTPConnection(target.hostname or "", target.port, timeout=WAIT_S)
    form = {"Content-Type": "application/x-www-form-urlencoded"} | headers
    link.request("POST", "/login", urlencode({"password": password}), form)
    answer = link.getresponse()
    answer.read()
    link.close()
    return answer.status, answer.headers.get("Set-Cookie", "")


@pytest.mark.slow
def test_wrong_passwords_delay_no_other_address(record: Record) -> None:
    """While one client's wrong password waits, its other attempts are refused, and another client comes in."""
    with (
        served(folder_of(record), "--proxy", "127.0.0.1", password=PASSWORD) as address,
        ThreadPoolExecutor(31) as clients,
    ):
        wrong = [
            clients.submit(enter, address, "another", **{"X-Forwarded-For": "192.0.2.1"}) for _ in range(30)
        ]  # fmt: skip
        wait_until(lambda: any(attempt.done() for attempt in wrong))
        right = enter(address, PASSWORD, **{"X-Forwarded-For": "192.0.2.2", "X-Forwarded-Proto": "https"})
        statuses = [attempt.result()[0] for attempt in wrong]
    assert right[0] == 303
    assert right[1].endswith("; Secure")
    assert set(statuses) == {403, 429}
    assert statuses.count(429) > statuses.count(403), "attempts do not queue"


@pytest.mark.slow
def test_proxy_is_believed_only_if_it_is_named(record: Record) -> None:
    with served(folder_of(record), password=PASSWORD) as address:
        status, cookie = enter(address, PASSWORD, **{"X-Forwarded-Proto": "https"})
    assert status == 303
    assert "Secure" not in cookie


def test_dashboard_without_a_password_changes_nothing(tab: Tab, address: str) -> None:
    tab.go(f"{address}/device?run={FLEET_RUN}&device=pi-3", "document.querySelector('#history')")
    assert tab.evaluate("document.querySelectorAll('main button').length") == 0
