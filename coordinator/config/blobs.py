"""The table [blobs]."""

from importlib.util import find_spec
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta, Struct

from fedvit.errors import ConfigError


class BlobsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object store through which large blobs move: the table [blobs]. It has no influence on training; a resumed run
    may use another store."""

    url: Annotated[
        str | None,
        Meta(description="Object store for large blobs: s3://BUCKET/PREFIX; without it they go over MQTT."),
    ] = None
    endpoint: Annotated[
        str | None,
        Meta(description="Address of an S3 server, as devices reach it: https://HOST[:PORT]; by default that of AWS."),
    ] = None
    region: Annotated[str, Meta(min_length=1, description="Region of the bucket.")] = "us-east-1"
    min_bytes: Annotated[
        int, Meta(ge=1, description="Smallest blob, in bytes, that goes through the store; others go over MQTT.")
    ] = 1 << 20
    fallback_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Largest blob, in bytes, that goes over MQTT while the store cannot be used.",
        ),
    ] = 64 << 20
    url_valid_s: Annotated[
        int, Meta(ge=1, le=604_800, description="Seconds for which a URL that a device gets is valid.")
    ] = 3600

    def __post_init__(self) -> None:
        if self.url is not None:
            parts = _split("url", self.url)
            if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query:
                raise ConfigError(f"blobs: url = {self.url!r} must be written s3://BUCKET/PREFIX, without keys")
        if self.endpoint is not None:
            parts = _split("endpoint", self.endpoint)
            more = "@" in parts.netloc or parts.path.strip("/") or parts.query
            if parts.scheme not in ("http", "https") or not parts.hostname or more:
                raise ConfigError(f"blobs: endpoint = {self.endpoint!r} must be written http(s)://HOST[:PORT]")

    @property
    def origin(self) -> str:
        """Scheme, host and port of every URL that devices get; empty without a store."""
        if self.url is None:
            return ""
        return (self.endpoint or f"https://s3.{self.region}.amazonaws.com").rstrip("/")

    @property
    def bucket(self) -> str:
        return urlsplit(self.url or "").netloc

    @property
    def prefix(self) -> str:
        return urlsplit(self.url or "").path.strip("/")


def check_blobs(config: BlobsConfig, where: str) -> None:
    """Raises ConfigError, which begins with `where`, if the library of the object store is not installed."""
    if config.url is not None and find_spec("obstore") is None:
        raise ConfigError(
            f"{where}: blobs: url = {config.url!r} needs the package 'obstore', which is not installed: "
            "pip install 'fedvit[s3]', or leave the url out"
        )


def _split(key: str, value: str) -> SplitResult:
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError as error:
        raise ConfigError(f"blobs: {key} = {value!r} is not a URL: {error}") from None
    return parts
