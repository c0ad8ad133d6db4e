"""The certificates of virtual devices: each joins its deployment with a token, as a board does."""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from edge_client.link.identity import Identity, host_and_port
from edge_client.storage.state import identity_folder
from fedvit.errors import ConfigError, LinkDown
from fedvit.hints import command
from fedvit.wire.enrolment import TOKEN_PREFIX, Token

JOINS_AT_ONCE = 16
"""Joins at the same time; a deployment's broker accepts 64 connections of devices that join."""
TOKEN_VALID_S = 3600.0


def find_identities(state: Path, devices: Iterable[str]) -> dict[str, Identity]:
    """Return the identities of the devices that have joined, by name. Raises ConfigError if one cannot be read."""
    found = {name: Identity.find(identity_folder(state / name)) for name in devices}
    return {name: identity for name, identity in found.items() if identity is not None}


def join_devices(
    state: Path, devices: Collection[str], tokens: Mapping[str, Token], broker: str | None = None
) -> dict[str, Identity]:
    """Let each device that has not joined do so; return the identities of all, by name.

    `broker` is HOST or HOST:PORT if the server has another address than in the tokens. Raises ConfigError if a token is
    missing, and what `join` raises.
    """
    joined = find_identities(state, devices)
    waiting = [name for name in devices if name not in joined]
    if missing := [name for name in waiting if name not in tokens]:
        raise ConfigError(
            "FV2124",
            f"there is no token for {missing[0]}, which has not joined ({len(missing)} of {len(devices)} devices): "
            "make them with `coordinator enroll device --count 200 --no-wait`",
        )
    from edge_client.link.join import join  # cryptography takes 7 MB, which a host without a deployment saves

    host, port = host_and_port(broker) if broker else (None, None)

    def let_join(name: str) -> Identity:
        token = tokens[name]
        given = msgspec.structs.replace(token, host=host or token.host, port=port or token.port)
        done = join(given, identity_folder(state / name))
        if done.trouble:
            raise LinkDown("FV1305", f"{name} has joined, but cannot connect: {done.trouble}")
        return done.identity

    with ThreadPoolExecutor(JOINS_AT_ONCE, thread_name_prefix="join") as pool:
        return joined | dict(zip(waiting, pool.map(let_join, waiting), strict=True))


def read_tokens(file: Path) -> dict[str, Token]:
    """Read tokens from the lines that `coordinator enroll NAME` prints, or its JSON, by device. Raises ConfigError."""
    try:
        words = file.read_text().replace('"', " ").replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FV2124", f"{file} cannot be read: {error}") from error
    tokens = [Token.parse(word) for word in words if word.startswith(TOKEN_PREFIX)]
    if not tokens:
        raise ConfigError("FV2124", f"{file} holds no token of `coordinator enroll NAME`")
    return {token.device: token for token in tokens}


def make_tokens(deployment_folder: Path, state: Path, devices: Iterable[str]) -> dict[str, Token]:
    """Make a token for each device that has not joined. Raises ConfigError unless the deployment is being served."""
    from coordinator.security import folder, service  # not needed on a host without a deployment

    joined = find_identities(state, devices)
    waiting = [name for name in devices if name not in joined]
    deployment = folder.Deployment.open(deployment_folder)
    if not waiting:
        return {}
    if not service.is_served(deployment):
        serve = command("coordinator", "serve", "--broker.deployment", deployment_folder)
        raise ConfigError(
            "FV2124", f"no coordinator serves {deployment_folder}, so that no device can join; start it with: {serve}"
        )
    tokens = folder.make_tokens(deployment, waiting, TOKEN_VALID_S)
    return {token.device: token for token in tokens}
