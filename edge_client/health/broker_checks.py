"""Checks of `edge-client doctor` on the connection: the broker, and a coordinator there."""

import secrets
import socket
import ssl
from collections.abc import Iterator

from edge_client.health.clocks import compare_clocks, explain_refusal
from edge_client.health.doctor_context import DoctorContext, Finding
from fedvit.errors import BadPayload, ConfigError, LinkDown
from fedvit.transport.address import Address, describe_error, tls_context
from fedvit.wire.transfer import CHUNK_MESSAGE_BYTES
from profiles.probes.broker import PROBE_BYTES, BrokerProbe
from profiles.probes.coordinator import find_coordinator

CONNECT_S = 5.0
SMALLER_BYTES = (65_536, 16_384, 4_096)
"""Sizes to try if a whole chunk is not accepted, to report which size is."""


def check_broker(context: DoctorContext) -> Iterator[Finding]:
    """Check the steps of a connection in their order; the first failure ends the check."""
    address = context.address
    step = "broker"
    try:
        with socket.create_connection((address.host, address.port), CONNECT_S) as plain:
            yield Finding(check=step, level="ok", what=f"{address} is reachable")
            if address.tls:
                step = "tls"
                with tls_context(address).wrap_socket(plain, server_hostname=address.host) as secured:
                    yield Finding(check=step, level="ok", what=f"{secured.version()}, the certificate is trusted")
    except OSError as error:
        hint = _reach_hint(error, address) if step == "broker" else _tls_hint(error, address)
        yield Finding(check=step, level="error", what=f"{address}: {describe_error(error)}", hint=hint)
        return
    except ConfigError as error:
        yield Finding(check=step, level="error", what=str(error), hint="name a readable PEM file with --ca-file")
        return
    topic = context.topics.probe(context.device)
    client_id = f"{context.device}-{secrets.token_hex(4)}"
    try:
        with BrokerProbe(address, client_id, topic) as probe:
            yield Finding(check="login", level="ok", what="the broker accepts this device")
            step = "messages"
            if probe.seconds(PROBE_BYTES) is None:
                raise LinkDown("FV1209", f"a message on {topic} is not answered")
    except LinkDown as error:
        what, hint = (
            str(error),
            f"the broker's access rules must let this device write below {topic.rpartition('/')[0]}/",
        )
        if step != "messages":
            step = "login"
            what, hint = explain_refusal(context) or (what, _login_hint(what, address))
        yield Finding(check=step, level="error", what=what, hint=hint)
        return
    yield from _check_size(context, client_id, topic)


def check_coordinator(context: DoctorContext) -> Iterator[Finding]:
    """Without a coordinator in its federation the device would wait for ever."""
    federation = context.topics.federation
    try:
        coordinator = find_coordinator(context.address, context.topics, context.device)
    except (LinkDown, ConfigError):
        return  # reported by check_broker
    if coordinator is None:
        yield Finding(
            check="coordinator",
            level="warning",
            what=f"no coordinator serves federation {federation!r} at this broker: this device would wait",
            hint="start it on the server (coordinator start, or coordinator serve), or name the federation that it "
            "serves with --federation",
        )
        return
    doing = f"run {coordinator.run!r}" if coordinator.run else "coordinator serve"
    what = f"{doing} on {coordinator.host or 'a host without a name'} serves federation {federation!r}"
    yield Finding(check="coordinator", level="ok", what=what)
    if coordinator.clock_s and (compared := compare_clocks(context, coordinator.clock_s)):
        what, hint = compared
        yield Finding(check="clock", level="warning", what=what, hint=hint)


def _check_size(context: DoctorContext, client_id: str, topic: str) -> Iterator[Finding]:
    if _is_accepted(context, client_id, topic, CHUNK_MESSAGE_BYTES):
        what = f"messages of {CHUNK_MESSAGE_BYTES} bytes are accepted"
        yield Finding(check="messages", level="ok", what=what)
        return
    fits = next((size for size in SMALLER_BYTES if _is_accepted(context, client_id, topic, size)), PROBE_BYTES)
    yield Finding(
        check="messages",
        level="error",
        what=f"a message of {CHUNK_MESSAGE_BYTES} bytes, as used for models, is not accepted; {fits} bytes are",
        hint="set the broker's limit to at least 131072 bytes: message_size_limit and max_packet_size of mosquitto, "
        "mqtt.max_packet_size of EMQX",
    )


def _is_accepted(context: DoctorContext, client_id: str, topic: str, size_bytes: int) -> bool:
    """Uses a separate connection: some brokers close it when a message is too large, others do not answer."""
    try:
        with BrokerProbe(context.address, client_id, topic) as probe:
            return probe.seconds(size_bytes) is not None
    except (LinkDown, BadPayload):
        return False


def _reach_hint(error: OSError, address: Address) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved: is {address.host!r} spelled correctly? Try the server's IP address"
    if isinstance(error, ConnectionRefusedError) and address.cert_file is not None:
        return (
            "no program listens there: is the coordinator running, with coordinator start --broker.deployment DIR? The "
            "address is that of the join; if the server has another name, address or port now: --broker HOST:PORT"
        )
    if isinstance(error, ConnectionRefusedError):
        return (
            "no program listens there: is the coordinator running, with --broker.listen 0.0.0.0 and --broker.port "
            f"{address.port}? By default it listens on its own machine only"
        )
    return "is the server on, in the same network, and does its firewall let this port through?"


def _tls_hint(error: OSError, address: Address) -> str:
    if isinstance(error, ssl.SSLCertVerificationError) and address.cert_file is not None:
        return (
            "this device trusts only the deployment that it joined: set the clock, use a name that coordinator "
            "init gave the server (--host), or join again with a token of the current deployment"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return "give the broker's certificate authority with --ca-file, use the name in the certificate, set the clock"
    return "does this port speak TLS? Without it the address is mqtt://"


def _login_hint(reason: str, address: Address) -> str:
    if address.cert_file is not None:
        return (
            "the broker does not accept this device's certificate: was it revoked (coordinator devices), or has it "
            "expired? Then join again, with a new token"
        )
    if "authoris" in reason or "password" in reason:
        return "give user and password: --broker mqtt://USER:PASSWORD@HOST (the coordinator's own broker knows fedvit)"
    if not address.tls:
        return "does this port speak MQTT without TLS? With it the address is mqtts://"
    return "is it an MQTT broker?"
