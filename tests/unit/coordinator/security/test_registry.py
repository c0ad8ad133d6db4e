"""A deployment's registry: its transactions, what they write beside them, and the file of an older version."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from coordinator.security.folder import Deployment, make_token
from coordinator.security.registry import FORGET_TOKENS_S, Certificate
from fedvit.errors import ConfigError, Damaged, DiskFull
from tests.support.codes import has_code
from tests.support.deployments import make_deployment

NOW = 1_700_000_000.0


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return make_deployment(tmp_path / "made")


def logins(deployment: Deployment) -> list[str]:
    return (deployment.folder / "enrolment.passwords").read_text().splitlines()


def device_joins(deployment: Deployment, name: str) -> None:
    with deployment.change() as rows:
        rows.put_device(name, Certificate(name.encode().hex(), NOW, NOW + 100.0), NOW)


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["its first bytes", "a page", "its end"])
def test_registry_that_is_damaged_is_named_with_what_to_do(deployment: Deployment, what: str) -> None:
    """Before anything is served from it."""
    for number in range(20):
        device_joins(deployment, f"pi-{number}")
    deployment.registry.close()
    path = deployment.registry.path
    content = path.read_bytes()
    wrong = b"\xff" * 900
    damaged = {
        "its first bytes": wrong + content[900:],
        "a page": content[:4096] + wrong + content[4996:],
        "its end": content[: len(content) // 2],
    }
    path.write_bytes(damaged[what])
    with pytest.raises(Damaged, check=has_code("FV1315")):
        Deployment.open(deployment.folder).write_configuration()


def test_registry_that_is_missing_is_not_made_anew(deployment: Deployment) -> None:
    """It would let in devices that were revoked."""
    deployment.registry.close()
    deployment.registry.path.unlink()
    with pytest.raises(ConfigError, check=has_code("FV1315")):
        Deployment.open(deployment.folder).write_configuration()
    assert not deployment.registry.path.exists()


# --- changes ------------------------------------------------------------------------------------------


def test_change_that_fails_changes_nothing(deployment: Deployment) -> None:
    def fails() -> None:
        with deployment.change() as rows:
            rows.put_device("pi-1", Certificate("a1", NOW, NOW + 100.0), NOW)
            rows.revocations.revoke("pi-1", NOW)
            raise ConfigError("FV0002", "no")

    with pytest.raises(ConfigError, check=has_code("FV0002", "no")):
        fails()
    with deployment.registry.read() as rows:
        assert (rows.read_devices(), rows.revocations.list_serials(), rows.generation()) == ([], [], 0)
    assert "pi-1" not in (deployment.folder / "devices.acl").read_text()


def test_registry_on_full_disk_reports_it_and_stays_intact(deployment: Deployment) -> None:
    """As the coordinator needs it to pause, and to resume."""

    def no_room(connection: Any, *_: object) -> None:
        connection.execute("PRAGMA max_page_count=1")  # no more pages than it has

    def many_join() -> None:
        with deployment.change() as rows:
            for number in range(1000):
                rows.put_device(f"pi-{number}", Certificate(f"{number:x}", NOW, NOW + 100.0), NOW)

    event.listen(deployment.registry._engine, "checkout", no_room)
    with pytest.raises(DiskFull, check=has_code("FV0012")):
        many_join()
    event.remove(deployment.registry._engine, "checkout", no_room)
    deployment.registry.close()
    deployment.registry.check()
    many_join()


TOKENS = """
import sys
from pathlib import Path
from coordinator.security.folder import Deployment, make_token
deployment = Deployment.open(Path(sys.argv[1]))
for number in range(10):
    make_token(deployment, f"{sys.argv[2]}-{number}", 60.0)
"""


def test_several_processes_change_the_registry_at_once(deployment: Deployment) -> None:
    command = [sys.executable, "-c", TOKENS, str(deployment.folder)]
    processes = [subprocess.Popen([*command, f"process-{number}"]) for number in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    with deployment.registry.read() as rows:
        tokens = rows.tokens.read_all()
        assert rows.generation() == len({token.device for token in tokens}) == 20
    assert sorted(line.split(":")[0] for line in logins(deployment)) == sorted(token.id for token in tokens)


def test_enrolment_writes_nothing_that_grows_with_the_fleet(deployment: Deployment) -> None:
    """The access list and the list of revoked certificates stay as they are; of the logins one is added."""
    make_token(deployment, "pi-0", 60.0)
    kept = [deployment.folder / name for name in ("devices.acl", "revoked.pem", "enrolment.acl", "mosquitto.conf")]
    before = [file.stat() for file in kept]
    passwords = deployment.folder / "enrolment.passwords"
    first, inode = passwords.read_bytes(), passwords.stat().st_ino
    token = make_token(deployment, "pi-1", 60.0)
    device_joins(deployment, "pi-1")
    assert [file.stat() for file in kept] == before
    assert passwords.stat().st_ino == inode
    assert passwords.read_bytes().startswith(first)
    assert logins(deployment)[-1].startswith(f"{token.id}:")
    assert passwords.stat().st_mode & 0o777 == 0o600


def test_revocation_names_the_device_whose_connections_must_end(deployment: Deployment) -> None:
    for name in ("pi-1", "pi-2", "pi-3"):
        device_joins(deployment, name)
    with deployment.change() as rows:
        rows.revocations.revoke("pi-1", NOW)
        first = rows.generation()
    with deployment.change() as rows:
        rows.revocations.revoke_certificates("pi-2")
    with deployment.registry.read() as rows:
        assert (rows.revocations.list_since(0), rows.revocations.list_since(first)) == (["pi-1", "pi-2"], ["pi-2"])
        assert rows.revocations.list_devices() == ["pi-1"]
    with deployment.change() as rows:
        rows.revocations.revoke("pi-1", NOW)  # once more: its connections are ended once more
    with deployment.registry.read() as rows:
        assert rows.revocations.list_since(first + 1) == ["pi-1"]
    rules = (deployment.folder / "devices.acl").read_text()
    assert "user pi-1\ntopic deny #" in rules
    assert "pi-2" not in rules


def test_tokens_of_long_ago_are_forgotten_and_their_logins(deployment: Deployment) -> None:
    old = make_token(deployment, "pi-1", -FORGET_TOKENS_S - 1.0)
    late = make_token(deployment, "pi-2", -FORGET_TOKENS_S + 60.0)
    new = make_token(deployment, "pi-3", 60.0)
    with deployment.registry.read() as rows:
        assert rows.tokens.find(old.id) is None
        assert {token.id for token in rows.tokens.read_all()} == {late.id, new.id}
    assert {line.split(":")[0] for line in logins(deployment)} == {late.id, new.id}


def test_logins_that_a_crash_left_half_written_are_made_anew_at_the_next_start(deployment: Deployment) -> None:
    tokens = [make_token(deployment, f"pi-{number}", 60.0) for number in range(2)]
    whole = logins(deployment)
    (deployment.folder / "enrolment.passwords").write_text(f"{whole[0]}\n{whole[1][:-30]}")
    deployment.write_configuration()
    lines = logins(deployment)
    assert [line.split(":")[0] for line in lines] == [token.id for token in tokens]
    assert lines[0] == whole[0]
    assert {len(line) for line in lines} == {len(whole[0])}
