"""The kinds of products and sums in which a teacher has a part, a model that the server sent."""

import pytest

from edge_client.trust.kinds import Kind, Value, attribute, multiply, sum_samples


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (Kind.FEATURE, Kind.SIGNAL),
        (Kind.LABEL, Kind.SIGNAL),
        (Kind.SIGNAL, Kind.SIGNAL),
        (Kind.TEACHER, Kind.TEACHER),
        (Kind.PUBLIC, Kind.TEACHER),
        (Kind.WEIGHT, Kind.TEACHER),
        (Kind.PERSONAL, Kind.TEACHER),
        (Kind.LINEAR, Kind.FEATURE),
        (Kind.RAW, Kind.RAW),
    ],
)
def test_a_teachers_features_are_an_error_only_beside_those_of_the_model(other: Kind, kind: Kind) -> None:
    assert multiply(Kind.TEACHER, other) == multiply(other, Kind.TEACHER) == kind


def test_products_and_sums_of_a_teachers_features() -> None:
    assert multiply(Kind.FEATURE, Kind.TEACHER, of_samples=False) == Kind.FEATURE
    # a sum of a teachers features stays what it is: No output of a phase may have this kind
    assert sum_samples(Kind.TEACHER | Kind.SIGNAL) == Kind.TEACHER | Kind.UPDATE


def test_features_are_a_teachers_if_everything_behind_them_is_from_the_server() -> None:
    sent, own = Value((3,), Kind.WEIGHT, is_from_server=True), Value((3,), Kind.WEIGHT)
    features = Value((3,), Kind.FEATURE | Kind.PUBLIC)
    taught = attribute(features, [sent, sent])
    assert (taught.kinds, taught.is_from_server) == (Kind.TEACHER | Kind.PUBLIC, True)
    mixed = attribute(taught, [taught, own])
    assert (mixed.kinds, mixed.is_from_server) == (Kind.TEACHER | Kind.PUBLIC, False)
    assert attribute(features, [sent, own]) == features
