"""The text of a run.toml, with what is wrong by key."""

from coordinator.views.dashboard.submit_page import EXAMPLE, read_text


def test_example_is_right() -> None:
    values, errors = read_text(EXAMPLE)
    assert errors == {}
    assert values["method"] == "fedavg"


def test_every_wrong_key_is_named_at_once() -> None:
    _, errors = read_text('rounds = -1\ndevics = 2\n[privacy]\nclip = "x"\n[broker]\nbroker = "auto"\n')
    assert sorted(errors) == ["broker", "devics", "privacy.clip", "rounds"]
    assert "devices" in errors["devics"], "it names the similar key"
    assert errors["rounds"].startswith("rounds = -1: ")


def test_text_that_is_not_toml_is_said_with_its_line() -> None:
    _, errors = read_text("rounds = \n")
    assert "line 1" in errors[""]


def test_keys_that_do_not_fit_together_are_said_of_the_whole() -> None:
    _, errors = read_text('method = "fedavg"\n[options]\nmu = 1.0\n')
    assert list(errors) == [""]
