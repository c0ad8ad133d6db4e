import pytest

from fedvit.client.connection import Connection
from fedvit.errors import ConfigError
from tests.support.codes import has_code


@pytest.mark.parametrize("url", ["http://host:99999", "http://host:x", "http://[", "host:80", "http://", "ftp://host"])
def test_address_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1815", repr(url))):
        Connection(url, "token")
