import pytest

from fedvit.hosts import is_loopback


@pytest.mark.parametrize(
    ("name", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("", False),
     ("localhost.evil.example", False), ("192.168.0.2", False)],
)  # fmt: skip
def test_names_by_which_only_this_machine_reaches_itself(name: str, expected: bool) -> None:
    assert is_loopback(name) is expected
