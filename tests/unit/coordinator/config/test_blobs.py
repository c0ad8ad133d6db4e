"""The table [blobs]: where the object store is, without its keys."""

import sys

import pytest

from coordinator.config import BlobsConfig, check_blobs, make_config, resume_config
from fedvit.errors import ConfigError
from tests.support.codes import has_code


def test_address_of_each_kind_of_store() -> None:
    blobs = make_config({"blobs": {"url": "s3://models/fleet/berlin/", "region": "eu-central-1"}}, "file").run.blobs
    assert (blobs.bucket, blobs.prefix) == ("models", "fleet/berlin")
    assert blobs.origin == "https://s3.eu-central-1.amazonaws.com"
    assert BlobsConfig(url="s3://models", endpoint="http://nas:9000/").origin == "http://nas:9000"
    assert BlobsConfig().origin == ""
    google, azure = BlobsConfig(url="gs://models/fleet/berlin"), BlobsConfig(url="az://acme/models/fleet/berlin")
    assert (google.bucket, google.prefix) == (azure.bucket, azure.prefix) == ("models", "fleet/berlin")
    assert google.origin == "https://storage.googleapis.com"
    assert (azure.account, azure.origin) == ("acme", "https://acme.blob.core.windows.net")
    assert BlobsConfig(url="az://acme/models", endpoint="http://nas:9000/").origin == "http://nas:9000"
    assert BlobsConfig(url="az://acme/models").prefix == ""
    blobs = BlobsConfig(url="file:///srv/mirror/", mirror=True, endpoint="http://nas:9000")
    assert (blobs.folder, blobs.origin) == ("/srv/mirror", "")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"url": "file:///srv/blobs"}, "is a folder, and no device can fetch from it: with mirror = true"),
        ({"url": "file://nas/blobs", "mirror": True}, "must be written file:///FOLDER, without keys"),
        ({"url": "file:///", "mirror": True}, "must be written file:///FOLDER, without keys"),
        ({"mirror": True}, "blobs: mirror = true needs the url of a store"),
        ({"url": "/srv/blobs"}, "url = '/srv/blobs' must be written s3://BUCKET/PREFIX, gs://"),
        ({"url": "https://host/x"}, "url = 'https://host/x' must be written s3://BUCKET/PREFIX, gs://"),
        ({"url": "gs://"}, "must be written gs://BUCKET/PREFIX, without keys"),
        ({"url": "az://account"}, "must be written az://ACCOUNT/CONTAINER/PREFIX, without keys"),
        ({"url": "az://account/models?sig=secret"}, "must be written az://ACCOUNT/CONTAINER/PREFIX, without keys"),
        ({"url": "s3://key:secret@bucket/x"}, "must be written s3://BUCKET/PREFIX, without keys"),
        ({"url": "s3://bucket", "endpoint": "nas:9000"}, "endpoint = 'nas:9000' must be written http"),
        ({"url": "s3://bucket", "endpoint": "http://nas:9000/bucket"}, "must be written http"),
        ({"url": "s3://bucket", "endpoint": "http://nas:port"}, "endpoint = 'http://nas:port' is not a URL"),
        ({"url": "s3://bucket", "url_valid_s": 0}, "url_valid_s"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config({"blobs": values}, "file")
    assert reason in str(error.value)


def test_missing_library_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_blobs(BlobsConfig(url="s3://models"), "flags")
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "obstore", raising=False)
    check_blobs(BlobsConfig(), "flags")
    with pytest.raises(ConfigError, check=has_code("FV1017")):
        check_blobs(BlobsConfig(url="s3://models"), "flags")


def test_resumed_run_may_use_another_store() -> None:
    began = {"method": "fedavg", "blobs": {"url": "s3://old/x", "min_bytes": 5000}}
    config = resume_config("r", began, {"blobs": {"url": "s3://new/x"}}, "flags")
    assert config.blobs == BlobsConfig(url="s3://new/x", min_bytes=5000)
