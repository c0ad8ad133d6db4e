"""The signatures that a coordinator has: its own key's, or those that somebody brought."""

from pathlib import Path

import pytest

from coordinator.security.folder import Deployment, make_token
from coordinator.security.signing import PUBLISHER_KEY, SIGNATURES, GraphSigner, are_own
from fedvit.errors import ConfigError
from fedvit.known_graphs import read_own_graphs
from fedvit.publisher import PublisherKey, add_signatures, is_signed_by
from fedvit.wire.enrolment import Token
from tests.support.codes import has_code
from tests.support.deployments import make_deployment

GRAPHS = {"train": "blake3:" + "a" * 64, "update": "blake3:" + "b" * 64}


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return make_deployment(tmp_path / "deployment")


def signer_of(deployment: Deployment) -> GraphSigner:
    signer = deployment.find_signer()
    assert signer is not None
    return signer


def test_deployment_signs_with_its_own_key(deployment: Deployment) -> None:
    signer = signer_of(deployment)
    signatures = signer.find_signatures(GRAPHS)
    assert signatures is not None
    assert all(map(is_signed_by, [signer.publisher] * 2, GRAPHS.values(), signatures))
    (deployment.folder / PUBLISHER_KEY).unlink()
    assert signer_of(deployment).find_signatures(GRAPHS) == signatures
    assert signer_of(deployment).find_signatures({"train": "blake3:00"}) is None


def test_signatures_that_come_later_are_used(deployment: Deployment, tmp_path: Path) -> None:
    (deployment.folder / PUBLISHER_KEY).rename(tmp_path / "elsewhere.key")
    signer = signer_of(deployment)
    assert signer.find_signatures(GRAPHS) is None
    assert not signer.has_new()
    add_signatures(deployment.folder / SIGNATURES, PublisherKey.read(tmp_path / "elsewhere.key"), GRAPHS.values())
    assert signer.has_new()
    assert not signer.has_new()
    assert signer.find_signatures(GRAPHS) is not None


def test_signatures_of_another_publisher_are_not_used(deployment: Deployment, tmp_path: Path) -> None:
    (deployment.folder / PUBLISHER_KEY).unlink()
    add_signatures(deployment.folder / SIGNATURES, PublisherKey.create(tmp_path / "other.key"), GRAPHS.values())
    assert signer_of(deployment).find_signatures(GRAPHS) is None


def test_token_names_the_publisher(deployment: Deployment) -> None:
    token = make_token(deployment, "pi-1", 60.0)
    assert Token.parse(token.text()).publisher == deployment.publisher
    assert deployment.publisher == PublisherKey.read(deployment.folder / PUBLISHER_KEY).public


def test_deployment_of_earlier_software_has_no_publisher(deployment: Deployment) -> None:
    (deployment.folder / "publisher").unlink()
    assert deployment.find_signer() is None
    token = make_token(deployment, "pi-1", 60.0)
    assert Token.parse(token.text()) == token
    assert token.publisher == ""
    (deployment.folder / "publisher").write_text("nobody")
    with pytest.raises(ConfigError, check=has_code("FV1436")):
        deployment.find_signer()


def test_own_graphs_are_recognised() -> None:
    own = sorted(read_own_graphs())[:2]
    assert are_own(dict(zip(("train", "update"), own, strict=True)))
    assert not are_own({"train": own[0], "update": GRAPHS["update"]})
