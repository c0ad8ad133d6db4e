"""Accuracy against what it cost."""

from profiles.report.curves import COSTS, Accuracy, Point, RoundFigures, add_up, curve, mean_over_seeds


def figures(number: int, accuracy: float | None, took_s: float | None = 2.0) -> RoundFigures:
    """Of four devices that received 3 MB, sent 1 MB and computed half a TFLOP each: 16 MB and 2 TFLOP together."""
    return RoundFigures(
        round=number, cohort=5, accepted=4, train_loss=None, bytes_down=3e6, bytes_up=1e6, flops=5e11, took_s=took_s,
        accuracy=None if accuracy is None else Accuracy(mean=accuracy, std_over_devices=0.1, weighted=accuracy),
    )  # fmt: skip


def test_costs_add_up_over_rounds() -> None:
    points = add_up(figures(number, 0.1 * number).point for number in (1, 2, 3))
    assert points[-1] == Point(3, 0.1 * 3, megabytes=48.0, teraflop=6.0, seconds=6.0)
    costs = {name: [at for at, _ in curve(points, cost)] for name, cost in COSTS.items()}
    assert list(costs.values()) == [[1, 2, 3], [16.0, 32.0, 48.0], [2.0, 4.0, 6.0], [2.0, 4.0, 6.0]]
    # mean over seeds has the rounds of all: Accuracies 0.2 and 0.4 in the first round; the second round has one
    # seed only
    longer, shorter = [figures(1, 0.2), figures(2, 0.6)], [figures(1, 0.4, took_s=4.0)]
    [mean] = mean_over_seeds([add_up(entry.point for entry in seed) for seed in (longer, shorter)])
    assert (mean.round, round(mean.accuracy or 0, 9), mean.megabytes, mean.seconds) == (1, 0.3, 16.0, 3.0)


def test_curve_has_the_rounds_that_were_evaluated_and_timed() -> None:
    points = add_up([figures(1, None).point, figures(2, 0.5).point])
    assert curve(points, COSTS["MB down and up, all devices"]) == [(32.0, 0.5)]
    points = add_up([figures(1, 0.4, took_s=None).point, figures(2, 0.5).point])
    assert curve(points, COSTS["seconds of rounds"]) == []
