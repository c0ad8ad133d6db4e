"""The table [blobs]."""

from importlib.util import find_spec
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta, Struct

from fedvit.errors import ConfigError

_FORMS = {
    "s3": "s3://BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "az": "az://ACCOUNT/CONTAINER/PREFIX",
    "file": "file:///FOLDER",
}


class BlobsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object store through which large blobs move: the table [blobs]. It has no influence on training; a resumed run
    may use another store."""

    url: Annotated[
        str | None,
        Meta(
            description="Object store for large blobs: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or "
            "az://ACCOUNT/CONTAINER/PREFIX; without it they go over MQTT. With mirror also a folder, file:///FOLDER."
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        Meta(
            description="Address of the store's server, as devices reach it: https://HOST[:PORT]; by default that of "
            "AWS, Google or Azure."
        ),
    ] = None
    region: Annotated[str, Meta(min_length=1, description="Region of a bucket of S3.")] = "us-east-1"
    mirror: Annotated[
        bool,
        Meta(
            description="Put every file that a resume needs into the store before the record names it, so that a "
            "standby needs no folder in common with the leader."
        ),
    ] = False
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
            secret = "@" in parts.netloc or parts.query
            named = self.folder if parts.scheme == "file" else parts.netloc and self.bucket
            if parts.scheme not in _FORMS or not named or secret:
                forms = _FORMS.get(parts.scheme) or ", ".join(_FORMS.values())
                raise ConfigError("FV1017", f"blobs: url = {self.url!r} must be written {forms}, without keys")
            if parts.scheme == "file" and not self.mirror:
                raise ConfigError(
                    "FV1017",
                    f"blobs: url = {self.url!r} is a folder, and no device can fetch from it: with mirror = true it "
                    "keeps the files of runs for a coordinator on another machine",
                )
        elif self.mirror:
            raise ConfigError("FV1017", "blobs: mirror = true needs the url of a store")
        if self.endpoint is not None:
            parts = _split("endpoint", self.endpoint)
            more = "@" in parts.netloc or parts.path.strip("/") or parts.query
            if parts.scheme not in ("http", "https") or not parts.hostname or more:
                raise ConfigError(
                    "FV1017", f"blobs: endpoint = {self.endpoint!r} must be written http(s)://HOST[:PORT]"
                )

    @property
    def scheme(self) -> str:
        """s3, gs, az or file; empty without a store."""
        return urlsplit(self.url or "").scheme

    @property
    def origin(self) -> str:
        """Scheme, host and port of every URL that devices get; empty without a store, or if it is a folder."""
        if self.endpoint and self.scheme not in ("", "file"):
            return self.endpoint.rstrip("/")
        match self.scheme:
            case "s3":
                return f"https://s3.{self.region}.amazonaws.com"
            case "gs":
                return "https://storage.googleapis.com"
            case "az":
                return f"https://{self.account}.blob.core.windows.net"
        return ""

    @property
    def folder(self) -> str:
        """The path of a store that is a folder; empty unless it is absolute."""
        parts = urlsplit(self.url or "")
        return parts.path.rstrip("/") if not parts.netloc else ""

    @property
    def account(self) -> str:
        """Account of an Azure store."""
        return urlsplit(self.url or "").netloc

    @property
    def bucket(self) -> str:
        """The bucket, or the container of Azure."""
        parts = urlsplit(self.url or "")
        return self._path[0] if parts.scheme == "az" else parts.netloc

    @property
    def prefix(self) -> str:
        return "/".join(self._path[1:] if self.scheme == "az" else self._path)

    @property
    def _path(self) -> list[str]:
        return urlsplit(self.url or "").path.strip("/").split("/")


def check_blobs(config: BlobsConfig, where: str) -> None:
    """Raise ConfigError, which begins with `where`, if the library of the object store is not installed."""
    if config.url is not None and find_spec("obstore") is None:
        raise ConfigError(
            "FV1017",
            f"{where}: blobs: url = {config.url!r} needs the package 'obstore', which is not installed: "
            "pip install 'fedvit[s3]', or leave the url out",
        )


def _split(key: str, value: str) -> SplitResult:
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises if it is no number
    except ValueError as error:
        raise ConfigError("FV1017", f"blobs: {key} = {value!r} is not a URL: {error}") from None
    return parts
