"""Views of a device's files."""

import time
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from edge_client.owner.page.device_view import DevicePart
from edge_client.owner.page.ledger_view import PAGE, read_page, show_ledger
from edge_client.owner.page.pictures import PictureFolder
from edge_client.owner.page.pictures_view import show_labelling, show_pictures
from edge_client.owner.page.use import LedgerUse
from edge_client.storage.ledger import DAY_S, Kind, Ledger, LedgerLine
from edge_client.storage.pause import OwnerPause
from fedvit.policy import make_policy
from tests.support.owner_pages import Home, make_home, make_settings, write_status


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = make_home(tmp_path)
    home.state.mkdir()
    return home


def add_line(home: Home, kind: Kind, size: int = 0, ago_s: float = 0.0, reason: str = "") -> None:
    key = "" if kind == "refused" else f"{kind}/{time.time()}"
    line = LedgerLine(time_s=time.time() - ago_s, kind=kind, run="birds", round=1, bytes=size, reason=reason, key=key)
    Ledger(home.state)._add(line, durable=False)


def show_device(home: Home, policy: str = "") -> str:
    settings = make_settings(home, make_policy(tomllib.loads(policy), "test"))
    return DevicePart(settings, home.state, LedgerUse(Ledger(home.state))).show("pi", 0).decode()


def test_budgets_of_the_policy_with_the_use_of_today(home: Home) -> None:
    write_status(home)
    add_line(home, "update", 50_000_000)
    add_line(home, "update", 70_000_000, ago_s=DAY_S + 60)
    (home.state / "vault").mkdir()
    (home.state / "vault" / "file").write_bytes(bytes(1000))
    (home.state / "models").mkdir()  # the budget is for bundles, too
    (home.state / "models" / "file").write_bytes(bytes(500))
    shown = show_device(home, '[send]\nmax_bytes_per_day = "200MB"\n[train]\ndisk = "2kB"\nmin_battery = 30')
    for text in ("50 MB of 200 MB", "1.5 kB of 2 kB", "30 % at least", "sent 1 update", "at most 200 MB a day"):
        assert text in shown or text.capitalize() in shown


def test_reason_why_no_task_is_taken_now(home: Home) -> None:
    hour = time.localtime().tm_hour
    quiet = f"{hour:02}:00-{(hour + 2) % 24:02}:00"
    shown = show_device(home, f'[train]\nquiet_hours = "{quiet}"')
    assert f"no: quiet hours until {(hour + 2) % 24:02}:00" in shown
    assert f"not {quiet}" in shown
    OwnerPause(home.state).begin()
    assert "no: paused by its owner" in show_device(home)
    OwnerPause(home.state).end()
    assert ">yes<" in show_device(home)


def test_use_is_read_again_when_the_ledger_has_changed(home: Home) -> None:
    use = LedgerUse(Ledger(home.state))
    assert use.read().bytes_of_24_hours == 0
    assert use.read() is use.read()
    add_line(home, "features", 7)
    assert use.read().bytes_of_24_hours == 7
    assert use.read().today.counts == {"features": 1}


def test_ledger_is_shown_in_words_the_newest_first(home: Home) -> None:
    add_line(home, "refused", reason="policy: <b>")
    for kind in ("update", "features", "training counts", "evaluation counts", "hello counts", "failure log"):
        add_line(home, kind, 1000)  # type: ignore[arg-type]
    shown = show_ledger(Ledger(home.state), "pi", 1).decode()
    assert shown.index("Lines of the log") < shown.index("Update of the model") < shown.index("policy: &lt;b&gt;")
    assert "1 to 7 of 7" in shown


@pytest.mark.parametrize("kind", get_args(Kind))
def test_each_kind_of_line_has_its_words(home: Home, kind: Kind) -> None:
    add_line(home, kind, 12_000)
    shown = show_ledger(Ledger(home.state), "pi", 1).decode()
    assert "12 kB" in shown


def test_pages_of_a_long_ledger(home: Home) -> None:
    ledger = Ledger(home.state)
    for number in range(2 * PAGE + 5):
        ledger._add(LedgerLine(time_s=number, kind="update", round=number), durable=False)
    found = {page: read_page(ledger, page) for page in (1, 3, 4)}
    assert [line.round for line in found[1][0]] == list(range(2 * PAGE + 4, PAGE + 4, -1))
    assert [line.round for line in found[3][0]] == [4, 3, 2, 1, 0]
    assert found[4] == ([], 2 * PAGE + 5)
    assert "page 3 of 3" in show_ledger(ledger, "pi", 3).decode()


def test_empty_ledger(home: Home) -> None:
    assert "Nothing has left it." in show_ledger(Ledger(home.state), "pi", 1).decode()


def test_folder_without_classes_is_explained(tmp_path: Path) -> None:
    pictures = PictureFolder(tmp_path)
    for shown in (show_pictures(pictures, "pi", "", 1), show_labelling(pictures, "pi", "", "")):
        assert b"no class folders" in shown


def test_more_classes_than_keys(home: Home) -> None:
    """Classes without a key have a button."""
    for number in range(80):
        (home.images / f"class-{number:02}").mkdir()
    shown = show_labelling(PictureFolder(home.images), "pi", "", "").decode()
    assert shown.count('name="label"') == 82
    assert shown.count("data-key") == 62


def test_no_picture_waits(home: Home) -> None:
    for file in (home.images / "unlabelled").iterdir():
        file.unlink()
    assert "No picture waits for a label." in show_labelling(PictureFolder(home.images), "pi", "0000.png", "").decode()


def test_pictures_of_a_class_are_in_pages(tmp_path: Path) -> None:
    pictures = PictureFolder(make_home(tmp_path, waiting=70).images)
    first, second = (show_pictures(pictures, "pi", "", page).decode() for page in (1, 2))
    assert (first.count("<img"), second.count("<img")) == (60, 10)
    assert show_pictures(pictures, "pi", "cat", 1).count(b"<img") == 1
    assert b"No picture here." in show_pictures(pictures, "pi", "bird", 1)
