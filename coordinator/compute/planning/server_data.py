"""The images that a run's server trains on."""

from pathlib import Path

from coordinator.compute.planning.batch import method_batch
from coordinator.config import RunConfig
from fedvit.data.server_images import ServerImages
from fedvit.errors import ConfigError, DataError
from fedvit.methods.base import Method, ServerRule
from fedvit.models.vit import PatchViT


def check_server_data(config: RunConfig, rule: ServerRule) -> None:
    """Raise ConfigError if the method's server needs images and has none, or the other way round."""
    if rule.needs_images and config.server_data is None:
        raise ConfigError(
            "FV2131", f"method {config.method!r} trains its server on images: name their folder in server_data"
        )
    if config.server_data is not None and not rule.needs_images:
        raise ConfigError(
            "FV2131", f"server_data = {config.server_data!r}: the server of method {config.method!r} reads no images"
        )


def read_server_images(config: RunConfig, method: Method, vit: PatchViT) -> ServerImages | None:
    """Find the images of `server_data`, None without it. Raises ConfigError if they cannot be read."""
    if config.server_data is None:
        return None
    try:
        return ServerImages(Path(config.server_data), method_batch(method, vit))
    except DataError as error:
        raise ConfigError(error.code, f"server_data = {config.server_data!r}: {error}") from error
