"""Reports as data: JSON, and figures that are derived."""

import msgspec

from profiles.report.document import Comparison, encode
from tests.support.reports import profile_document


def test_json_holds_everything() -> None:
    raw = msgspec.json.decode(encode(profile_document()))
    assert (raw["schema"], raw["kind"]) == (1, "profile")
    assert raw["convention"].startswith("2 FLOPs per multiply-add")
    assert len(raw["devices"][0]["predictions"]) == len(raw["variants"]) == 4


def test_relative_errors_need_both_figures() -> None:
    """(predicted - measured) / measured: (3 - 4) / 4."""

    def error(predicted: float | None, measured: float | None) -> float | None:
        return Comparison(figure="f", unit="s", predicted=predicted, measured=measured).relative_error

    assert error(3.0, 4.0) == -0.25
    assert [error(None, 4.0), error(3.0, None), error(3.0, 0.0)] == [None, None, None]
