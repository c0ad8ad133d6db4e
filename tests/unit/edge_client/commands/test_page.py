from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from fedvit.errors import ConfigError, FedvitError
from tests.support.codes import has_code
from tests.support.owner_pages import make_home, page_process


def fail(*flags: str, **environment: str) -> BaseException | None:
    return CliRunner().invoke(cli, ["page", *flags], env={"FEDVIT_PAGE_PASSWORD": None, **environment}).exception


@pytest.mark.parametrize(
    ("flags", "environment", "code"),
    [
        (["--listen", "0.0.0.0:0"], {}, "FV1426"),
        (["--listen", "192.0.2.7:0"], {}, "FV1426"),
        (["--listen", "192.0.2.7:0"], {"FEDVIT_PAGE_PASSWORD": "eight letters"}, "FV1426"),  # not of this machine
        (["--listen", "nowhere"], {}, "FV1426"),
        (["--listen", "99999"], {}, "FV1426"),
        (["--listen", "0"], {"FEDVIT_PAGE_PASSWORD": "seven"}, "FV1427"),
        (["--listen", "0", "--password-file", "missing"], {}, "FV1427"),
    ],
)
def test_page_that_cannot_be_served(tmp_path: Path, flags: list[str], environment: dict[str, str], code: str) -> None:
    home = make_home(tmp_path)
    error = fail("--data", str(home.images), "--state", str(home.state), *flags, **environment)
    assert isinstance(error, FedvitError)
    assert has_code(code)(error)


def test_folder_of_images_is_needed() -> None:
    error = fail("--listen", "0")
    assert isinstance(error, ConfigError)
    assert has_code("FV1402")(error)


def test_pages_of_one_device_keep_their_addresses(tmp_path: Path) -> None:
    with page_process(home := make_home(tmp_path), password=None) as address:
        with page_process(home, password=None):
            assert len(list(home.state.glob("page-*.url"))) == 2
        [left] = home.state.glob("page-*.url")
        assert left.read_text().startswith(address)
