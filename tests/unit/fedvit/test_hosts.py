import pytest

from fedvit.hosts import is_loopback, network_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False),
     ("localhost.evil.example", False), ("192.168.0.2", False)],
)  # fmt: skip
def test_names_by_which_only_this_machine_reaches_itself(name: str, expected: bool) -> None:
    assert is_loopback(name) is expected


def test_clients_of_a_socket_for_both_versions_are_told_apart() -> None:
    """Else one that guesses passwords would lock out all."""
    assert [network_of(f"::ffff:192.0.2.{host}") for host in (7, 8)] == ["192.0.2.7", "192.0.2.8"]
