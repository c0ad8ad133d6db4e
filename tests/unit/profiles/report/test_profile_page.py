"""Pages of profiles: the figures of their documents, in one file that needs no other."""

import re

import msgspec
import pytest

from profiles.report.document import Comparison
from profiles.report.page import BarChart, ChartBar, Segment, on_one_scale
from profiles.report.profile_page import profile_page
from tests.support.reports import profile_document

PROFILE = profile_page(profile_document())


def test_a_page_needs_no_other_file() -> None:
    assert not re.search(r'(src|href)="(?!#|data:)', PROFILE)
    assert "<script src" not in PROFILE
    assert profile_page(profile_document()) == PROFILE
    assert len(profile_page(profile_document(masks=(0.0, 0.25, 0.5, 0.75), splits=(1, 2, 4)))) < 300_000


class TestProfile:
    def test_the_verdict_comes_first(self) -> None:
        """Only the Zero 2 W, with 430 MB, fits nothing: 4 of 5 boards x 4 variants fit, where an hour is enough."""
        document = profile_document()
        assert f"{document.fitting} of 20 pairs of device and variant fit their budgets." in PROFILE
        assert 'class="banner mild"' in PROFILE
        assert "rpi-zero2w: no variant fits, over its budget of memory and time" in PROFILE
        roomy = profile_page(profile_document((("agx-orin-64", "MAXN"),), round_deadline_s=1e6))
        assert "Every variant fits the budget of every device." in roomy
        assert 'class="banner good"' in roomy
        tight = profile_page(profile_document((("rpi5-8", None),), memory_bytes=10**8))
        assert "No variant fits the budget of any device." in tight
        assert 'class="banner bad"' in tight

    def test_every_pair_is_in_the_matrix(self) -> None:
        matrix = PROFILE[PROFILE.index('<table class="matrix">') :].partition("</table>")[0]
        fitting = profile_document().fitting
        assert matrix.count('<td class="left good">fits') == fitting
        assert matrix.count('<td class="left bad">over: ') == 20 - fitting

    def test_frozen_blocks_are_hatched(self) -> None:
        """Two bars (forward, backward) of 12 - M blocks each, in two variants with M = 2 and two with M = 4, and one
        patch in each legend."""
        assert PROFILE.count('hatched" style=') == 2 * (2 * 10 + 2 * 8)
        assert PROFILE.count('<i class="hatched">') == 4

    def test_the_budget_is_drawn_where_it_is_near(self) -> None:
        """In the memory of the Zero 2 W (430 MB), and not in that of a Thor (128 GB)."""
        memory = PROFILE[PROFILE.index("Memory by phase") :]
        assert "memory budget, 430 MB" in memory
        assert "memory budget, 137 GB" not in memory

    def test_page_shows_doubts_and_models(self) -> None:
        assert "Energy is modelled: training time x power under load." in PROFILE
        assert "thor-t5000: not verified:" in PROFILE

    def test_what_is_not_known_is_not_zero(self) -> None:
        """Nobody said what a Thor needs when idle, so its energy is not known."""
        assert "power not known" in PROFILE
        alone = profile_page(profile_document((("thor-t5000", None),)))
        assert "Energy of a round" not in alone

    def test_published_figures_stand_beside_ours(self) -> None:
        """2.997 where 4.413 is true: 32 % too low."""
        row = PROFILE[PROFILE.index("EFTViT, Table 4") :].partition("</tr>")[0]
        assert "2.997 GMAC" in row
        assert "4.413 GMAC" in row
        assert "−32 %" in row

    def test_measurements_stand_beside_predictions(self) -> None:
        """(3 - 2) / 2."""
        assert "Predicted and measured" not in PROFILE
        step = Comparison(figure="step on this desk", unit="s", predicted=3.0, measured=2.0)
        page = profile_page(msgspec.structs.replace(profile_document(), measured=[step]))
        row = page[page.index("step on this desk") :].partition("</tr>")[0]
        assert re.findall(r"<td>(.*?)</td>", row) == ["3.00 s", "2.00 s", "+50 %"]


class TestChart:
    """The scale of bars and of their limit."""

    def bar(self, value: float, limit: float | None) -> ChartBar:
        return ChartBar("bar", (Segment(value, "c0", "part"),), "", limit)

    def test_a_near_limit_is_on_the_scale_and_a_far_one_is_not(self) -> None:
        """Bars of 10: a limit of 20 stretches the scale to 20 (2 % more), one of 100 would make them vanish."""
        near, far = BarChart((self.bar(10, 20),)), BarChart((self.bar(10, 100),))
        assert near.scale == pytest.approx(20.4)
        assert near.shows_limits
        assert far.scale == pytest.approx(10.2)
        assert not far.shows_limits
        assert near.percent(10.2) == "50.00%"

    def test_charts_on_one_scale_have_bars_that_can_be_compared(self) -> None:
        """10 and 40 of the scale of the larger chart, 40.8."""
        small, large = on_one_scale([BarChart((self.bar(10, None),)), BarChart((self.bar(40, None),))])
        assert (small.percent(10), large.percent(40)) == ("24.51%", "98.04%")

    def test_nothing_at_all_has_a_scale(self) -> None:
        assert BarChart((self.bar(0, None),)).percent(0) == "0.00%"
        assert BarChart(()).scale > 0
