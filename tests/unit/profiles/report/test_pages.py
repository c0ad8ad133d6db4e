"""Pages of profiles and runs: the figures of their documents, in one file that needs no other."""

import re

import msgspec
import pytest

from profiles.report.confusion import confusion
from profiles.report.device_columns import device_csv
from profiles.report.document import ClassAccuracy, Comparison
from profiles.report.page import Bar, Chart, Segment, on_one_scale
from profiles.report.profile_page import profile_page
from profiles.report.run_page import MOST_ROWS, run_page
from tests.support.reports import fleet_document, private_document, profile_document, run_document

PROFILE = profile_page(profile_document())
RUN = run_page(run_document())


@pytest.mark.parametrize("page", [PROFILE, RUN])
def test_a_page_needs_no_other_file(page: str) -> None:
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "<script src" not in page
    assert "url(" not in page.replace("url(#", "")
    assert len(page) < 300_000
    assert page.startswith("<!doctype html>")


def test_large_reports_stay_small() -> None:
    """Twelve variants on five boards; four devices over 200 rounds, whose single rounds only the JSON has."""
    many = profile_page(profile_document(masks=(0.0, 0.25, 0.5, 0.75), splits=(1, 2, 4)))
    assert len(many) < 300_000
    long = run_page(run_document(rounds=200))
    assert MOST_ROWS < 4 * 200
    assert "800 rows: the JSON has them" in long
    assert len(long) < 300_000


def test_the_same_document_gives_the_same_page() -> None:
    assert profile_page(profile_document()) == PROFILE
    assert run_page(run_document()) == RUN


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


class TestRun:
    def test_names_and_reasons_are_no_markup(self) -> None:
        assert "<b>unknown</b>" not in RUN
        assert "&lt;b&gt;unknown&lt;/b&gt;" in RUN

    def test_the_verdict_names_what_went_wrong(self) -> None:
        assert "Finished: 12 of 12 rounds, accuracy 0.880" in RUN
        assert "pi-a broke its budget of time in 1 round" in RUN
        assert "1 result of 1 device never came" in RUN
        assert "3 refusals, listed below" in RUN

    def test_a_failed_run_is_bad_news(self) -> None:
        failed = msgspec.structs.replace(run_document(), status="failed", reason="the disk is full")
        page = run_page(failed)
        assert 'class="banner bad"' in page
        assert "why it ended: the disk is full" in page

    def test_settings_are_a_table(self) -> None:
        settings = RUN[RUN.index("<h2>Settings</h2>") :].partition("</table>")[0]
        assert re.findall("<td>(.*?)</td>", settings) == [
            "devices", "4", "options.mask", "0.75", "classes", "100 values",
        ]  # fmt: skip
        plain = run_page(msgspec.structs.replace(run_document(), settings={}))
        assert "All at their defaults." in plain

    def test_predicted_stands_beside_measured(self) -> None:
        """pi-b's energy was not measured: no bar, and no zero."""
        assert RUN.count(">predicted</span>") == 3  # legends of training, memory and energy
        energy = RUN[RUN.index("<h3>energy of a round</h3>") :].partition("Medians over rounds")[0]
        assert "pi-a" in energy
        assert "pi-b" not in energy
        assert "not measured" in RUN[RUN.index("pi-b in figures") :].partition("</details>")[0]

    def test_budgets_kept_and_broken(self) -> None:
        budgets = RUN[RUN.index("<h2>Budgets</h2>") :].partition("</table>")[0]
        assert budgets.count(">kept<") == 7
        assert budgets.count("broken in 1 round") == 1

    def test_a_run_without_predictions(self) -> None:
        page = run_page(run_document(predicted=False))
        assert "This run kept no predictions." in page
        assert ">predicted</span>" not in page
        assert "kept by the device alone" in page  # the budget that was broken is still told

    def test_a_run_that_has_only_begun(self) -> None:
        page = run_page(msgspec.structs.replace(run_document(), status="running", rounds=[], devices=[], refusals=[]))
        assert "Nothing was measured yet." in page
        assert "Running: 0 of 12 rounds, not evaluated" in page


class TestFleet:
    """The same page of 500 devices: what they have in common, the extremes, and all of them in one table."""

    DOCUMENT = fleet_document(500)
    PAGE = run_page(DOCUMENT)

    def part(self, heading: str) -> str:
        return self.PAGE.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]

    def test_page_has_every_device_in_one_table_with_values_to_sort_by(self) -> None:
        table = self.part("Devices")
        assert table.count("<tr>") == 501
        first = table[table.index("<tbody>") :].partition("</tr>")[0]
        assert '<td data-value="0.4">0.400</td>' in first
        assert len(self.PAGE) < 600_000

    def test_page_shows_the_distribution_and_the_lowest(self) -> None:
        part = self.part("Accuracy over devices")
        assert "<svg" in part
        lowest = re.findall(r'<td class="left">(.*?)</td>', part)
        assert lowest == [device.device for device in self.DOCUMENT.devices if device.accuracy == 0.4][:10]

    def test_page_shows_a_few_bars_of_the_highest_costs(self) -> None:
        memory = self.PAGE[self.PAGE.index("<h3>peak memory</h3>") :].partition("</div>\n</div>")[0]
        assert memory.count('<span class="track">') == 20, "predicted and measured, of ten"
        assert "in figures</summary>" not in self.part("Predicted and measured")
        assert self.PAGE.count("broke its budget of") == 10
        assert "500 devices broke a budget in all" in self.PAGE

    def test_a_column_without_a_figure_is_left_out(self) -> None:
        assert "energy" in self.part("Devices")
        bare = run_page(run_document(predicted=False))
        assert ">memory predicted</button>" not in bare
        assert ">memory predicted</button>" in RUN

    def test_csv_has_the_figures_as_numbers(self) -> None:
        lines = device_csv(self.DOCUMENT).splitlines()
        assert len(lines) == 501
        first = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
        shown = [first[name] for name in ("device", "accuracy", "bytes_down", "energy_j", "budgets_broken", "changes")]
        assert shown == ["pi-0", "0.4", "849000000", "9984.0", "1", ""]

    def test_classes_have_their_accuracy(self) -> None:
        assert "Accuracy by class" not in RUN
        classes = self.part("Accuracy by class")
        assert re.findall("<td.*?>(.*?)</td>", classes[: classes.index("Answers by class")]) == [
            "ant", "0.750", "400", "300", "bee 80, wasp 20", "bee", "0.900", "100", "50", "ant 10",
        ]  # fmt: skip

    def test_answers_are_a_matrix_of_classes(self) -> None:
        """Of two classes with test images and a third that was answered."""
        matrix = self.PAGE[self.PAGE.index('<table class="confusion">') :]
        matrix = matrix[: matrix.index("</table>")]
        assert re.findall('<th scope="col">(.*?)</th>', matrix) == ["class / answer", "ant", "bee", "wasp"]
        assert re.findall("<td.*?>(.*?)</td>", matrix) == ["300", "80", "20", "10", "90", ""]

    def test_matrix_of_many_classes_is_left_out(self) -> None:
        many = [ClassAccuracy(name=str(n), devices=1, images=2, correct=1, wrong={"0": 1}) for n in range(1, 30)]
        assert confusion(many) is None

    def test_duration_is_that_of_the_rounds(self) -> None:
        assert "<b>90.0 min</b><span>from the first round to the last</span>" in self.PAGE


class TestChart:
    """The scale of bars and of their limit."""

    def bar(self, value: float, limit: float | None) -> Bar:
        return Bar("bar", (Segment(value, "c0", "part"),), "", limit)

    def test_a_near_limit_is_on_the_scale_and_a_far_one_is_not(self) -> None:
        """Bars of 10: a limit of 20 stretches the scale to 20 (2 % more), one of 100 would make them vanish."""
        near, far = Chart((self.bar(10, 20),)), Chart((self.bar(10, 100),))
        assert near.scale == pytest.approx(20.4)
        assert near.shows_limits
        assert far.scale == pytest.approx(10.2)
        assert not far.shows_limits
        assert near.percent(10.2) == "50.00%"

    def test_charts_on_one_scale_have_bars_that_can_be_compared(self) -> None:
        """10 and 40 of the scale of the larger chart, 40.8."""
        small, large = on_one_scale([Chart((self.bar(10, None),)), Chart((self.bar(40, None),))])
        assert (small.percent(10), large.percent(40)) == ("24.51%", "98.04%")

    def test_nothing_at_all_has_a_scale(self) -> None:
        assert Chart((self.bar(0, None),)).percent(0) == "0.00%"
        assert Chart(()).scale > 0


class TestPrivacy:
    def test_page_shows_spent_privacy(self) -> None:
        """Round 2 had no upload: of features nothing is known of it, and the last round counts."""
        page = run_page(private_document())
        section = page[page.index("<h2>Privacy</h2>") : page.index("<h2>Devices</h2>")]
        assert "updates: epsilon 4 over all rounds so far (delta 0.0001, noise 1.5 x clip 0.5, any" in section
        assert "features: epsilon 75 over all rounds so far, 50 in the last one, 1 of a single row" in section
        assert section.count("<svg") == 2
        rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in section.split("<tr>")[2:]]
        assert rows == [["1", "2.5", "40", "40", "1"], ["2", "2.5", "", "", ""], ["3", "4", "75", "50", "1"]]

    def test_deterministic_noise_is_reported(self) -> None:
        assert "protects nobody" in run_page(private_document(deterministic_noise=True))
        assert "protects nobody" not in run_page(private_document())

    def test_only_the_kinds_that_there_are(self) -> None:
        page = run_page(private_document(feature_noise=0.0))
        assert "privacy of one device&#39;s features" not in page
        assert "<h2>Privacy</h2>" not in RUN

    def test_before_the_first_round(self) -> None:
        page = run_page(msgspec.structs.replace(private_document(), status="running", rounds=[]))
        assert page.count("no round is closed yet") == 2
        assert "Privacy by round" not in page
