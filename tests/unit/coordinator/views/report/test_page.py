"""The page of a run: the figures of its report, in one file that needs no other."""

import csv
import re

import msgspec
import pytest

from coordinator.views.report.classes import make_confusion
from coordinator.views.report.devices import device_sheet
from coordinator.views.report.document import ClassAccuracy, RunReport
from coordinator.views.report.page import MOST_ROWS, run_page
from tests.support.reports import fleet_report, private_report, run_report, with_run

RUN = run_page(run_report())


def body_cells(part: str) -> list[str]:
    return re.findall(r">([^<>]*)</t[dh]>", part.rpartition("<tbody>")[2])


def test_a_page_needs_no_other_file() -> None:
    assert not re.search(r'(src|href)="(?!#|data:)', RUN)
    assert "<script src" not in RUN
    assert "url(" not in RUN.replace("url(#", "")
    assert run_page(run_report()) == RUN


def test_large_reports_stay_small() -> None:
    """Four devices over 200 rounds, whose single rounds only the JSON has."""
    long = run_page(run_report(rounds=200))
    assert MOST_ROWS < 4 * 200
    assert "800 rows: the JSON has them" in long
    assert len(long) < 300_000


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
        failed = with_run(run_report(), status="failed", reason="the disk is full")
        page = run_page(failed)
        assert 'class="banner bad"' in page
        assert "why it ended: the disk is full" in page

    def test_settings_are_a_table(self) -> None:
        settings = RUN[RUN.index("<h2>Settings</h2>") :].partition("</table>")[0]
        assert re.findall("<td>(.*?)</td>", settings) == [
            "devices", "4", "options.mask", "0.75", "classes", "100 values",
        ]  # fmt: skip
        plain = run_page(with_run(run_report(), settings={}))
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
        page = run_page(run_report(predicted=False))
        assert "This run kept no predictions." in page
        assert ">predicted</span>" not in page
        assert "kept by the device alone" in page  # the budget that was broken is still told

    def test_a_run_that_has_only_begun(self) -> None:
        begun = msgspec.structs.replace(run_report(), devices=[], refusals=[])
        page = run_page(with_run(begun, status="running", rounds=[], mean_accuracy=None))
        assert "Nothing was measured yet." in page
        assert "Running: 0 of 12 rounds, not evaluated" in page


class TestFleet:
    """The same page of 500 devices: what they have in common, the extremes, and all of them in one table."""

    document: RunReport
    page: str

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def write_page(cls) -> None:
        """Write it when the first test needs it, not when the module is imported: it takes seconds."""
        cls.document = fleet_report(500)
        cls.page = run_page(cls.document)

    def part(self, heading: str) -> str:
        return self.page.partition(f"<h2>{heading}</h2>")[2].partition("<h2>")[0]

    def test_page_has_every_device_in_one_table_with_values_to_sort_by(self) -> None:
        table = self.part("Devices")
        assert table.count("<tr>") == 501
        first = table[table.index("<tbody>") :].partition("</tr>")[0]
        assert '<td data-value="0.4">0.400</td>' in first
        assert len(self.page) < 600_000

    def test_page_shows_the_distribution_and_the_lowest(self) -> None:
        part = self.part("Accuracy over devices")
        assert "<svg" in part
        lowest = re.findall(r'<th scope="row" class="left">(.*?)</th>', part)
        assert lowest == [device.device for device in self.document.devices if device.totals.accuracy == 0.4][:10]

    def test_page_shows_a_few_bars_of_the_highest_costs(self) -> None:
        memory = self.page[self.page.index("<h3>peak memory</h3>") :].partition("</div>\n</div>")[0]
        assert memory.count('<span class="track">') == 20, "predicted and measured, of ten"
        assert "in figures</summary>" not in self.part("Predicted and measured")
        assert self.page.count("broke its budget of") == 10
        assert "500 devices broke a budget in all" in self.page

    def test_a_column_without_a_figure_is_left_out(self) -> None:
        assert "energy" in self.part("Devices")
        bare = run_page(run_report(predicted=False))
        assert ">memory predicted</button>" not in bare
        assert ">memory predicted</button>" in RUN

    def test_csv_has_the_figures_as_numbers(self) -> None:
        rows = list(csv.DictReader(device_sheet(self.document.devices).csv().splitlines()))
        assert len(rows) == 500
        first = rows[0]
        shown = [first[name] for name in ("device", "accuracy", "bytes_down", "energy_j", "budgets_broken", "changes")]
        assert shown == ["pi-0", "0.4", "849000000", "9984.0", "1", ""]

    def test_classes_have_their_accuracy(self) -> None:
        assert "Accuracy by class" not in RUN
        classes = self.part("Accuracy by class")
        assert body_cells(classes[: classes.index("Answers by class")]) == [
            "ant", "0.750", "400", "300", "bee 80, wasp 20", "bee", "0.900", "100", "50", "ant 10",
        ]  # fmt: skip

    def test_answers_are_a_matrix_of_classes(self) -> None:
        """Two classes with test images and a third that was answered."""
        matrix = self.page[self.page.index('<table class="confusion">') :]
        matrix = matrix[: matrix.index("</table>")]
        assert re.findall('<th scope="col">(.*?)</th>', matrix) == ["class / answer", "ant", "bee", "wasp"]
        assert re.findall("<td.*?>(.*?)</td>", matrix) == ["300", "80", "20", "10", "90", ""]

    def test_matrix_of_many_classes_is_left_out(self) -> None:
        many = [ClassAccuracy(name=str(n), devices=1, images=2, correct=1, wrong={"0": 1}) for n in range(1, 30)]
        assert make_confusion(many) is None

    def test_duration_is_that_of_the_rounds(self) -> None:
        assert "<b>90.0 min</b><span>from the first round to the last</span>" in self.page


class TestPrivacy:
    def test_page_shows_spent_privacy(self) -> None:
        """Round 2 had no upload: of features nothing is known of it, and the last round counts."""
        page = run_page(private_report())
        section = page[page.index("<h2>Privacy</h2>") : page.index("<h2>Devices</h2>")]
        assert "updates: epsilon 4 over all rounds so far (delta 0.0001, noise 1.5 x clip 0.5, any" in section
        assert "features: epsilon 75 over all rounds so far, 50 in the last one, 1 of a single row" in section
        assert section.count("<svg") == 2
        rows = [re.findall(r"<t[dh][ >].*?>?([^<>]*)</t[dh]>", row) for row in section.split("<tr>")[2:]]
        assert rows == [["1", "2.5", "40", "40", "1"], ["2", "2.5", "–", "–", "–"], ["3", "4", "75", "50", "1"]]

    def test_deterministic_noise_is_reported(self) -> None:
        assert "protects nobody" in run_page(private_report(deterministic_noise=True))
        assert "protects nobody" not in run_page(private_report())

    def test_only_the_kinds_that_there_are(self) -> None:
        page = run_page(private_report(feature_noise=0.0))
        assert "privacy of one device&#39;s features" not in page
        assert "<h2>Privacy</h2>" not in RUN

    def test_before_the_first_round(self) -> None:
        page = run_page(with_run(private_report(), status="running", rounds=[]))
        assert page.count("no round is closed yet") == 2
        assert "Privacy by round" not in page
