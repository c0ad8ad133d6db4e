"""Policies as owners write them: read whole, or refused in one line that names the key and its value."""

import datetime
from collections.abc import Sequence

import pytest

from fedvit.errors import ConfigError
from fedvit.policy import Hours, Needs, Policy, describe_policy, find_narrowness, make_policy, parse_policy
from tests.support.codes import has_code

WHOLE = """
[send]
updates = "single"
features = "none"
min_mask = 0.75
class_counts = true
max_bytes_per_day = "200MB"
upload = "5MB"
[train]
methods = "checked"
hours = "22:00-06:00"
memory = "512MB"
disk = 2000000000
flops = "2TFLOP"
round_deadline = "10m"
max_temperature = "65C"
min_battery = 30
busy_file = "/run/busy"
[models]
from_coordinator = false
"""


def read(text: str) -> Policy:
    return make_policy(parse_policy(text, "policy.toml"), "policy.toml")


def test_every_key_is_read() -> None:
    policy = read(WHOLE)
    assert (policy.send.max_bytes_per_day, policy.train.hours) == (200_000_000, Hours.parse("22:00-06:00"))
    assert (policy.budget.memory_bytes, policy.budget.upload_bytes) == (512_000_000, 5_000_000)
    assert (policy.budget.flops_per_round, policy.budget.round_deadline_s) == (2 * 10**12, 600.0)
    assert (policy.train.max_temperature, str(policy.train.busy_file)) == (65.0, "/run/busy")
    assert policy.denials() == ("features",)
    assert not policy.models.from_coordinator
    assert "models: the owner chooses which one is used; drift is reported" in describe_policy(policy)


def test_defaults_are_those_of_a_careful_owner() -> None:
    lines = list(describe_policy(read("")))
    assert len(lines) == 6
    assert lines[0] == (
        "may be sent: updates of single devices; features with at least 50% of the patches left out; no counts by class"
    )
    assert Policy().denials() == ("class_counts",)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[send]\nupdate = "none"', "[send]: unknown key 'update'; did you mean 'updates'?"),
        ("[sent]", "unknown key 'sent'; did you mean 'send'?"),
        ("send = 1", "send = 1 must be a table: [send]"),
        ('[send]\nupdates = "singel"', "updates = 'singel': invalid value 'singel'; allowed are none | single | sum"),
        ("[send]\nmin_mask = 1.0", "min_mask = 1.0: "),
        ('[send]\nmax_bytes_per_day = "much"', "max_bytes_per_day = 'much': "),
        ("[send]\nupload = 0", "upload = 0: "),
        ("[send]\nmin_noise = 0.5", 'min_noise = 0.5: updates = "single" leave without noise'),
        ("[train]\nmin_battery = 101", "min_battery = 101: "),
        ('[train]\nhours = "22-6"', "hours = '22-6': "),
        ('[train]\nhours = "22:00-06:00"\nquiet_hours = "21:00-07:00"', "leave no time"),
        ('[train]\nhours = "22:00-06:00"\nquiet_hours = "22:00-06:00"', "leave no time"),
        ("[send", "policy.toml is not TOML"),
    ],
)
def test_wrong_policies_are_refused_in_one_line(text: str, named: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1431", named)) as raised:
        read(text)
    assert "\n" not in str(raised.value)


def test_noise_that_a_sum_must_have_is_told() -> None:
    first, *_ = describe_policy(read('[send]\nupdates = "sum"\nmin_cohort = 7\nmin_noise = 0.5'))
    assert first.startswith(
        "may be sent: updates inside sums of 7 devices or more only, with noise of 0.5 times their clip;"
    )


def test_hours_that_overlap_quiet_ones_leave_time() -> None:
    for quiet in ("23:00-05:00", "22:00-05:00", "12:00-05:00", "07:00-21:00"):
        assert read(f'[train]\nhours = "22:00-06:00"\nquiet_hours = "{quiet}"').train.hours


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[send]\nupdates = "none"\nfeatures = "none"', "only methods that send nothing"),
        ('[train]\nmethods = "known"', "no publisher is trusted"),
    ],
)
def test_narrow_policies_are_told(text: str, named: str) -> None:
    assert named in str(find_narrowness(read(text)))
    assert len(list(describe_policy(read(text)))) == 7


@pytest.mark.parametrize(
    ("needs", "denials", "least_mask", "said"),
    [
        (Needs(True, False, 1.0), ("features", "class_counts"), 0.9, None),
        (Needs(True, False, 1.0), ("updates",), 0.0, "updates"),
        (Needs(True, False, 1.0), ("single_updates",), 0.0, "updates of single devices"),
        (Needs(True, False, 1.0, secure=True), ("single_updates",), 0.0, None),
        (Needs(True, False, 1.0, secure=True), ("updates", "single_updates"), 0.0, "updates"),
        (Needs(False, True, 0.75), ("updates",), 0.75, None),
        (Needs(False, True, 0.75), ("features",), 0.0, "features"),
        (Needs(False, True, 0.5), (), 0.75, "features with less than 75% of the patches left out"),
        (Needs(False, False, 1.0), ("updates", "features"), 0.9, None),
        (Needs(False, False, 1.0), ("methods", "another key"), 0.0, None),
        (Needs(False, False, 1.0, ""), ("methods",), 0.0, "graphs that no trusted publisher has signed"),
    ],
)
def test_what_a_run_needs_is_compared_with_what_a_device_denies(
    needs: Needs, denials: Sequence[str], least_mask: float, said: str | None
) -> None:
    assert needs.find_denial(denials, least_mask) == said


@pytest.mark.parametrize(
    ("signed_by", "trusted", "allowed"),
    [("A", "A", True), ("B", "A", False), ("", "A", False), ("A", "", False), ("", "", False), (None, "", True)],
)
def test_graphs_of_another_publisher_are_denied(signed_by: str | None, trusted: str, allowed: bool) -> None:
    """None: the graphs are fedvit's own, or not made yet."""
    needs = Needs(True, False, 1.0, signed_by)
    assert (needs.find_denial(("methods",), 0.0, trusted) is None) == allowed
    assert needs.find_denial((), 0.0, trusted) is None


@pytest.mark.parametrize(("hour", "rest_h"), [(21, 1.0), (22, 0.0), (5, 0.0), (6, 16.0)])
def test_other_hours_are_the_rest_of_the_day(hour: int, rest_h: float) -> None:
    now = datetime.datetime(2026, 11, 26, hour)
    assert Hours.parse("22:00-06:00").others.remaining_s(now) == rest_h * 3600
