"""The request of `edge-client serve`, without the libraries that do it."""

from pathlib import Path
from typing import NamedTuple

from edge_client.settings import DeviceSettings
from fedvit.small_server import ListenAddress


class ServeRequest(NamedTuple):
    """The pictures that are answered, the place, and the device's models."""

    settings: DeviceSettings
    state: Path
    address: ListenAddress
    token: str | None  # None: requests need none
    folders: tuple[Path, ...]  # whose new pictures are answered
    sources: tuple[str, ...]  # cameras, streams, videos, Frigate's folders
    every_s: float  # between two pictures of a source
    results: Path | None  # file of the predictions for folders and sources
    top: int  # classes in a line of it
