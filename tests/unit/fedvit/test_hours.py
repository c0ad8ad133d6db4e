"""Hours of a policy, as owners write them."""

import pytest

from fedvit.errors import ConfigError
from fedvit.policy import Hours
from tests.support.codes import has_code


@pytest.mark.parametrize("text", ["22-6", "25:00-06:00", "22:61-06:00", "always", "", "10:00-10:00"])
def test_invalid_quiet_hours_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1416", text)):
        Hours.parse(text)
