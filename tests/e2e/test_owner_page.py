"""The owner's page, as Chromium shows it: of a real `edge-client page`, in the end beside a device that trains."""

import re
import shutil
import signal
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from edge_client.storage.ledger import Ledger, LedgerLine
from edge_client.storage.pause import OwnerPause
from edge_client.storage.state import lock_state
from tests.e2e.test_growing_folder import count_trained, endless, images_of, next_round
from tests.support.chromium import Browser, Tab
from tests.support.owner_pages import PASSWORD, Home, add_image, make_home, page_process, write_status
from tests.support.programs import Stage, wait_for
from tests.support.waiting import wait_until

ASKED = "document.querySelector('#secret')"
READY = "document.querySelector('#guess')?.textContent.match(/says|No guess/)"
"""The view of a picture is whole, and takes keys."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = make_home(tmp_path)
    home.state.mkdir()
    return home


def sign_in(tab: Tab, address: str, password: str = PASSWORD) -> None:
    tab.go(address, ASKED)
    tab.evaluate(f"document.querySelector('#secret').value = '{password}'")
    tab.evaluate("document.querySelector('form').requestSubmit()")


def open_page(tab: Tab, address: str, path: str = "/", until: str = "document.querySelector('h1')") -> None:
    sign_in(tab, address)
    tab.until("document.querySelector('#now')")
    if path != "/":
        tab.go(f"{address}{path}", until)


def test_wrong_password_opens_nothing_and_the_right_one_does(browser: Browser, home: Home) -> None:
    with page_process(home) as address, browser.tab() as tab:
        sign_in(tab, address, "seven letters")
        tab.until("document.querySelector('[role=alert]')")
        assert "The password is wrong." in tab.text()
        tab.go(f"{address}/left", ASKED)
        sign_in(tab, address)
        tab.until("document.querySelector('#now')")


def test_token_of_the_printed_address_opens_the_page(tab: Tab, home: Home) -> None:
    with page_process(home, password=None) as address:
        tab.go(address, ASKED)
        file = home.state / f"page-{urlsplit(address).port}.url"
        assert file.stat().st_mode & 0o777 == 0o600
        tab.go(file.read_text().strip(), "document.querySelector('#now')")
        assert tab.evaluate("location.href") == f"{address}/", "the token is in no address that the browser keeps"
    assert not file.exists()


def test_pictures_are_labelled_by_keys_and_by_touch(tab: Tab, home: Home) -> None:
    """Black by its key, gray skipped, white by touch; then undone, and keys are switched off."""
    with page_process(home) as address:
        open_page(tab, address, "/label", READY)
        assert "1 of 3 without a label: 0000.png" in tab.text()
        assert "No guess: this device has no model yet" in tab.text()
        tab.press("2")
        tab.until("document.querySelector('#said').textContent == '0000.png is dog now.'")
        tab.until(f"{READY} && document.querySelector('main').textContent.includes('1 of 2 without a label: 0001.png')")
        assert "dog/0000.png" in home.files()
        tab.press(" ")
        tab.until(f"{READY} && document.querySelector('main').textContent.includes('2 of 2 without a label: 0002.png')")
        tab.evaluate("document.querySelector('[data-label=cat]').click()")
        tab.until(f"{READY} && document.querySelector('main').textContent.includes('1 of 1 without a label: 0001.png')")
        assert {"cat/0002.png", "unlabelled/0001.png"} < set(home.files())
        tab.press("u")
        tab.until(f"{READY} && document.querySelector('main').textContent.includes('2 of 2 without a label: 0002.png')")
        assert "unlabelled/0002.png" in home.files()
        tab.evaluate("document.querySelector('#keys').click()")
        tab.press("1")
        tab.evaluate("document.querySelector('[data-label=cat]').click()")
        tab.until("document.querySelector('#said').textContent == '0002.png is cat now.'")
        assert "cat/0002.png" in home.files()
        assert "unlabelled/0001.png" in home.files(), "the key did nothing"


def test_damaged_picture_is_explained_and_skipped(tab: Tab, home: Home) -> None:
    file = home.images / "unlabelled" / "0000.png"
    file.write_bytes(file.read_bytes()[:40])
    with page_process(home) as address:
        open_page(tab, address, "/label", "document.querySelector('.banner.bad')")
        assert "Cannot read image unlabelled/0000.png" in tab.text()
        assert tab.evaluate("[...document.querySelectorAll('[data-label]')].every(one => one.disabled)")
        tab.press("1")
        tab.press(" ")
        tab.until(f"{READY} && document.querySelector('main').textContent.includes('2 of 3 without a label: 0001.png')")
        assert file.exists()
        tab.go(f"{address}/pictures", "document.querySelectorAll('.grid img').length == 3")
        tab.until("[...document.querySelectorAll('.grid img')].every(one => one.complete && one.naturalWidth)")


@pytest.mark.slow
def test_thousands_of_pictures_wait(browser: Browser, tmp_path: Path) -> None:
    home = make_home(tmp_path, waiting=1)
    [first] = (home.images / "unlabelled").iterdir()
    for number in range(1, 2000):
        shutil.copy(first, first.with_name(f"{number:04}.png"))
    with page_process(home) as address, browser.tab() as tab:
        open_page(tab, address, "/pictures", "document.querySelectorAll('.grid img').length == 60")
        assert "page 1 of 34" in tab.text(".pages")
        tab.go(f"{address}/pictures?page=34", "document.querySelectorAll('.grid img').length == 20")
        tab.go(f"{address}/label?picture=1998.png", READY)
        tab.press("1")
        tab.until("document.querySelector('main').textContent.includes('1999 of 1999 without a label: 1999.png')")
        assert tab.complaints == []
    assert (home.images / "cat" / "1998.png").is_file()


def test_pause_and_resume_by_the_button(tab: Tab, home: Home) -> None:
    write_status(home)
    with page_process(home) as address:
        open_page(tab, address)
        tab.evaluate("document.querySelector('#pause').click()")
        tab.until("document.querySelector('#now').textContent.includes('Paused by you since')")
        assert OwnerPause(home.state).is_on()
        OwnerPause(home.state).end()
        tab.until("document.querySelector('#pause').textContent == 'Pause this device'")  # without a reload


@pytest.mark.slow
def test_views_are_accessible_in_each_width_and_scheme_and_load_nothing_from_elsewhere(tab: Tab, home: Home) -> None:
    for name in ("unlabelled", "cat"):
        add_image(home.images / name / f"a-{'very-' * 20}long-name.png", 9)
    (home.images / "unlabelled" / "9.png").write_text("damaged")
    for number in range(150):
        kind = ("update", "refused", "features")[number % 3]
        line = LedgerLine(time_s=time.time() - 3600 * number, kind=kind, run="birds", round=number, what="a" * 300)
        Ledger(home.state)._add(line, durable=False)
    write_status(home, "training", run="birds", round=3, done_steps=4, total_steps=8)
    lock_state(home.state)
    flags = ["--policy", str(home.state / "policy.toml")]
    (home.state / "policy.toml").write_text('[send]\nmax_bytes_per_day = "9MB"\n[train]\nhours = "01:00-00:59"\n')
    views = {
        "/": "document.querySelector('progress')",
        "/left": "document.querySelectorAll('.ledger li').length == 100",
        "/left?page=2": "document.querySelectorAll('.ledger li').length == 50",
        "/pictures": "document.querySelectorAll('.grid img').length == 5",
        "/label": READY,
        "/label?picture=9.png": "document.querySelector('.banner.bad')",
        "/picture?name=cat%252Fknown.png": READY,
    }
    with page_process(home, *flags) as address:
        found = []
        tab.go(address, ASKED)
        found += tab.violations()
        open_page(tab, address)
        for path, until in views.items():
            tab.go(f"{address}{path}", until)
            for width in (400, 800, 1400):
                for dark in (False, True):
                    tab.resize(width, dark=dark)
                    wide = tab.evaluate("document.documentElement.scrollWidth > innerWidth")
                    found += [f"{path} at {width}: {one}" for one in [*tab.violations(), *["too wide"] * wide]]
            urls = tab.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
            found += [url for url in urls if not url.startswith(f"{address}/")]
        assert found == []


@pytest.mark.slow
def test_labels_and_pause_reach_a_device_that_trains(browser: Browser, stage: Stage) -> None:
    """Three labels count from the next round on, with a guess of the model before; a pause survives a restart of the
    device, which trains again when its owner resumes it."""
    images = stage.folder / "parts" / "device-0"
    shutil.copytree(stage.parts / "device-0", images)
    stage.parts = images.parent
    (images / "unlabelled").mkdir()
    for file in sorted((images / "train").glob("*/*.png"))[:3]:
        file.rename(images / "unlabelled" / f"{file.parent.name}-{file.name}")
    before = len(list((images / "train").glob("*/*.png")))
    home = Home(images, stage.folder / "state" / "device-0")
    coordinator = endless(stage)
    device = stage.device("device-0")
    assert count_trained(stage, 1) == before
    with page_process(home, "--threads", "1") as address, browser.tab() as tab:
        open_page(tab, address, "/label", READY)

        def is_guessed() -> bool:
            """A task that begins while the model is read makes the next look necessary."""
            tab.go(f"{address}/label", READY)
            return re.search(r"The model says \d \(\d+ %\), Enter agrees\.", tab.text()) is not None

        wait_until(is_guessed)
        for left in (2, 1, 0):
            tab.press("1")
            shown = f"{READY} && document.querySelector('main').textContent.includes('of {left} without a label')"
            tab.until(shown if left else "document.querySelector('main').textContent.includes('No picture waits')")
        assert count_trained(stage, next_round(stage)) == before + 3

        tab.go(address, "document.querySelector('#pause')")
        tab.evaluate("document.querySelector('#pause').click()")
        tab.until("document.querySelector('h1').textContent == 'Paused by its owner'")
        wait_for(lambda: "task declined" in stage.log("device-0"), "the device to decline a task")
        device.send_signal(signal.SIGTERM)
        assert stage.finish(device, "device-0") == 0
        tab.until("document.querySelector('h1').textContent == 'Not running'")
        declined = stage.log("device-0").count("task declined")
        stage.device("device-0")
        wait_for(lambda: stage.log("device-0").count("task declined") > declined, "it to decline after its restart")
        assert "reason='paused by its owner'" in stage.log("device-0")

        reached = next_round(stage)
        tab.evaluate("document.querySelector('#pause').click()")
        wait_for(lambda: images_of(stage, reached), "a round after the pause")
        wait_until(lambda: "update" in tab.evaluate("document.querySelector('#left').textContent"))
        assert tab.complaints == []
    coordinator.send_signal(signal.SIGINT)
    assert stage.finish(coordinator, "coordinator") == 130
    assert "Traceback" not in stage.log("device-0")
