"""A device that a doctor looks at."""

from pathlib import Path

import pytest

from edge_client.health.doctor_context import DoctorContext
from fedvit.transport.address import Address
from fedvit.wire.topics import Topics
from tests.support.boards import pi_4


@pytest.fixture
def context(tmp_path: Path) -> DoctorContext:
    """A Pi 4 without images and without a broker."""
    return DoctorContext(
        address=Address.parse("127.0.0.1:1"),
        topics=Topics("home"),
        device="pi",
        state=tmp_path / "state",
        data=None,
        test_share=0.2,
        identity_folder=tmp_path / "identity",
        root=pi_4(tmp_path / "root"),
    )
