"""Brokers of other makers, as Debian packages them: nats-server and RabbitMQ, one node or several, all on loopback."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from coordinator.security.broker.process import Broker, BrokerProgram, claim_port
from fedvit.transport.address import Address

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The program behind Debian's wrapper, which would change the user."""


def usual(*kinds: str) -> list[str]:
    """The brokers that a contract is held over: these, or those that `make test-brokers` names instead."""
    return os.environ.get("FEDVIT_TEST_BROKERS", "").split() or list(kinds)


def start_nats(folder: Path, count: int = 1, users: Path | None = None) -> list[Broker]:
    """A node, or a cluster of them; `users` is a part of its configuration. MQTT needs JetStream there, which keeps its
    sessions in files."""
    program = shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    assert program, "this test needs nats-server: make nats"
    routes = [_port() for _ in range(count)]
    nodes = []
    for number in range(count):
        home = folder / f"node-{number}"
        home.mkdir(parents=True)
        mqtt, config = _port(), home / "nats.conf"
        lines = [
            f"server_name: node-{number}",
            f'listen: "127.0.0.1:{_port()}"',
            f'jetstream {{ store_dir: "{home}/state" }}',
            f'mqtt {{ host: "127.0.0.1", port: {mqtt}, stream_replicas: {count}, consumer_replicas: {count} }}',
        ]
        if count > 1:
            others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes if port != routes[number])
            lines.append(f'cluster {{ name: fleet, listen: "127.0.0.1:{routes[number]}", routes: [{others}] }}')
        if users:
            shutil.copy(users, home)
            lines.append(f'include "{users.name}"')
        config.write_text("\n".join(lines) + "\n")
        nodes.append(_start("nats-server", mqtt, [program, "-c", str(config)], {}, home))
    return nodes


def start_rabbitmq(
    folder: Path, count: int = 1, definitions: Path | None = None
) -> tuple[list[Broker], Callable[[], None]]:
    """A node, or a cluster of them, with the MQTT plugin, where anybody may do anything unless there are `definitions`;
    and what ends the name server that they share."""
    assert RABBITMQ.exists(), "this test needs rabbitmq-server: make rabbitmq"
    folder.mkdir(parents=True, exist_ok=True)
    epmd_port, epmd = _port(), shutil.which("epmd")
    assert epmd
    names = _start("epmd", epmd_port, [epmd, "-address", "127.0.0.1", "-port", str(epmd_port)], {}, folder)
    members = [f"fedvit-{number}@localhost" for number in range(count)]
    plugins = folder / "plugins"
    plugins.write_text("[rabbitmq_mqtt].\n")
    nodes = []
    for name in members:
        home = folder / name
        home.mkdir(parents=True)
        mqtt, config = _port(), home / "rabbitmq.conf"
        lines = [
            "listeners.tcp = none",
            f"mqtt.listeners.tcp.1 = 127.0.0.1:{mqtt}",
            f"mqtt.allow_anonymous = {'false' if definitions else 'true'}",
            *([f"load_definitions = {definitions}"] if definitions else []),
            "log.console = true",
            "log.file = false",
            "cluster_formation.peer_discovery_backend = classic_config",
            *(f"cluster_formation.classic_config.nodes.{place} = {member}" for place, member in enumerate(members, 1)),
        ]
        config.write_text("\n".join(lines) + "\n")
        environment = {
            "HOME": str(folder),  # with the cookie that the nodes share
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": name,
            "RABBITMQ_DIST_PORT": str(_port()),
            "RABBITMQ_MNESIA_BASE": str(home / "state"),
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_CONF_ENV_FILE": str(home / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(home / "feature_flags"),
            "RABBITMQ_PID_FILE": str(home / "pid"),
            "RABBITMQ_ALLOW_INPUT": "true",  # the program itself, not a shell around it, is then our child
            # no idle spinning of its schedulers, and no shell
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none -noinput "
            "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        nodes.append(_start("rabbitmq-server", mqtt, [str(RABBITMQ)], environment, home))
    return nodes, names.stop


def _port() -> int:
    return claim_port()


def _start(kind: str, port: int, command: list[str], environment: dict[str, str], folder: Path) -> Broker:
    return Broker(
        kind, Address("127.0.0.1", port), BrokerProgram(command, {**os.environ, **environment}, folder / "log")
    )
