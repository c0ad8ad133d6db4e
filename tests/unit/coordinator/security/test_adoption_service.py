"""The window that pages open: real devices ask, and a person types codes."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.security.adoption_service import TRIES, AdoptionService, AdoptionState
from coordinator.security.broker.process import claim_port
from coordinator.security.folder import Deployment, Settings
from coordinator.security.registry import Certificate
from fedvit.errors import ConfigError
from fedvit.wire.enrolment import Token
from tests.support.adopting import LOCALHOST, Device
from tests.support.codes import has_code
from tests.support.waiting import wait_until

WINDOW_S = 600.0


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment.create(
        tmp_path / "deployment",
        Settings(federation="home", listen=LOCALHOST, port=1, enrolment_port=2, hosts=("localhost",)),
    )


@pytest.fixture
def service(deployment: Deployment) -> Iterator[AdoptionService]:
    service = AdoptionService(deployment)
    service.open(f"{LOCALHOST}:{claim_port()}", WINDOW_S)
    yield service
    end(service)


def end(service: AdoptionService) -> None:
    service.close()
    wait_until(lambda: service.state == AdoptionState(), lambda: f"the window stays: {service.state}")


def ask(service: AdoptionService, name: str = "pi-3") -> tuple[Device, str]:
    """A device that asks, and its code."""
    device = Device(int(service.state.place.rpartition(":")[2]), name)
    code = device.read_code()
    wait_until(lambda: service.state.device == name, lambda: f"{name} is not shown: {service.state}")
    return device, code


def test_device_gets_a_token_after_its_code_was_typed(service: AdoptionService, deployment: Deployment) -> None:
    device, code = ask(service)
    assert service.state.device_address == LOCALHOST
    assert service.admit(code, replaces=False) == "pi-3"
    token = Token.parse(str(device.end()))
    assert token.device == "pi-3"
    with deployment.registry.read() as rows:
        assert [one.id for one in rows.tokens.read_all()] == [token.id]
    assert service.state.device == ""
    other, code = ask(service, "pi-4")
    assert service.admit(code.replace(" ", ""), replaces=False) == "pi-4"
    assert Token.parse(str(other.end())).device == "pi-4"


def test_device_is_refused_after_wrong_codes(service: AdoptionService, deployment: Deployment) -> None:
    device, code = ask(service)
    wrong = f"{(int(code.replace(' ', '')) + 1) % 10**6:06d}"
    for _ in range(TRIES):
        with pytest.raises(ConfigError, check=has_code("FV1341", wrong)):
            service.admit(wrong, replaces=False)
    with pytest.raises(ConfigError, check=has_code("FV1342", "no device asks")):
        service.admit(code, replaces=False)
    assert has_code("FV1342", f"{TRIES} wrong codes")(device.end())  # type: ignore[arg-type]
    with deployment.registry.read() as rows:
        assert rows.tokens.read_all() == []


def test_device_is_refused_by_hand_and_when_the_window_closes(service: AdoptionService) -> None:
    device, _ = ask(service)
    assert service.refuse() == "pi-3"
    assert has_code("FV1342", "not typed")(device.end())  # type: ignore[arg-type]
    device, _ = ask(service)
    end(service)
    assert has_code("FV1342", "in time")(device.end())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, check=has_code("FV1342", "no device asks")):
        service.refuse()


def test_name_that_is_taken_is_replaced_only_if_asked(service: AdoptionService, deployment: Deployment) -> None:
    with deployment.change() as rows:
        rows.put_device("pi-3", Certificate("1f", 0.0, 1e12), 0.0)
    device, code = ask(service)
    with pytest.raises(ConfigError, check=has_code("FV1306", "pi-3")):
        service.admit(code, replaces=False)
    refusal = device.end()
    assert has_code("FV1342", "operator reads why")(refusal)  # type: ignore[arg-type]
    assert str(deployment.folder) not in str(refusal)
    device, code = ask(service)
    assert service.admit(code, replaces=True) == "pi-3"
    assert Token.parse(str(device.end())).device == "pi-3"


def test_window_is_opened_once(service: AdoptionService) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1342", service.state.place)):
        service.open(f"{LOCALHOST}:{claim_port()}", WINDOW_S)
    end(service)
    service.open(f"{LOCALHOST}:{claim_port()}", WINDOW_S)
    device, code = ask(service)
    service.admit(code, replaces=False)
    assert isinstance(device.end(), str)


def test_window_closes_by_itself(deployment: Deployment) -> None:
    service = AdoptionService(deployment)
    service.open(f"{LOCALHOST}:{claim_port()}", 1.0)
    wait_until(lambda: service.state == AdoptionState(), lambda: f"the window stays: {service.state}")


def test_window_opens_without_a_network(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    service = AdoptionService(deployment)
    service.open(f"0.0.0.0:{claim_port()}", WINDOW_S)
    wait_until(lambda: "no network" in service.state.note, lambda: f"nothing says why: {service.state}")
    assert service.state.closes_at
    end(service)


def test_address_that_cannot_be_used_is_named(deployment: Deployment) -> None:
    service = AdoptionService(deployment)
    for listen in ("", "192.0.2.1:8886", f"{LOCALHOST}:x"):
        with pytest.raises(ConfigError, check=has_code("FV1342", listen)):
            service.open(listen, WINDOW_S)
        assert service.state == AdoptionState()
