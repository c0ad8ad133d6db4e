import pytest

from fedvit.client.connection import Connection
from fedvit.errors import ConfigError
from tests.support.codes import has_code


@pytest.mark.parametrize("url", ["http://host:99999", "http://host:x", "http://[", "host:80", "http://", "ftp://host"])
def test_address_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1815", repr(url))):
        Connection(url, "token")


@pytest.mark.parametrize("url", ["https://u:secret@host", "https://u:x/secret@host", "https://u:secret#x@host"])
def test_address_that_is_refused_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ConfigError, check=has_code("FV1815")) as refused:
        Connection(url, "token")
    assert "secret" not in str(refused.value)
