"""What the owner of a device allows, as it is written on the command line."""

import pytest

from edge_client.settings import Hours
from fedvit.errors import ConfigError
from tests.support.codes import has_code


@pytest.mark.parametrize("text", ["22-6", "25:00-06:00", "22:61-06:00", "always", "", "10:00-10:00"])
def test_invalid_quiet_hours_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1416", text)):
        Hours.parse(text)
