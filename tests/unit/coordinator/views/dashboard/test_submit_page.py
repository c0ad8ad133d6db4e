"""The text of a run.toml, with what is wrong by key."""

from coordinator.views.dashboard.submit_page import EXAMPLE, read_text


def test_example_is_right() -> None:
    values, errors = read_text(EXAMPLE)
    assert errors == {}
    assert values["method"] == "fedavg"


def test_text_that_cannot_be_used_is_explained_by_key_or_line() -> None:
    _, errors = read_text('rounds = -1\ndevics = 2\n[privacy]\nclip = "x"\n[broker]\nbroker = "auto"\n')
    assert sorted(errors) == ["broker", "devics", "privacy.clip", "rounds"]
    assert "devices" in errors["devics"], "it names the similar key"
    assert errors["rounds"].startswith("rounds = -1: ")
    _, errors = read_text("rounds = \n")
    assert "line 1" in errors[""]
    _, errors = read_text('method = "fedavg"\n[options]\nmu = 1.0\n')
    assert list(errors) == [""]
