"""A board's certificate as a document that can be checked, as a page in Markdown, and as a row of docs/boards.md."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_client.link.identity import Identity
from edge_client.link.signature import Signature, find_signer, sign
from edge_client.owner.certify import BoardCertificate, ProgramFigures
from fedvit.errors import ConfigError
from fedvit.quantities import format_bytes, format_seconds

UNSIGNED = "this device has not joined a deployment, so it has no key to sign with"


class Document(Struct, frozen=True, kw_only=True):
    """A certificate with its signature."""

    certificate: BoardCertificate
    signature: Signature | None
    unsigned: str | None = None  # reason why there is no signature


def make_document(certificate: BoardCertificate, identity: Identity | None) -> Document:
    """Sign a certificate if the device has a key. Raises ConfigError."""
    if identity is None:
        return Document(certificate=certificate, signature=None, unsigned=UNSIGNED)
    return Document(certificate=certificate, signature=sign(encode_certificate(certificate), identity))


def encode_certificate(certificate: BoardCertificate) -> bytes:
    """Return the bytes that are signed: JSON without spaces, keys in order."""
    return msgspec.json.encode(certificate, order="sorted")


def find_signer_of(document: Document) -> str | None:
    """Return the name of the device that signed; None without a right signature."""
    if document.signature is None:
        return None
    return find_signer(encode_certificate(document.certificate), document.signature)


def describe_signature(document: Document) -> str:
    """Return whose signature it is, or why there is none."""
    if document.signature is None:
        return f"unsigned: {document.unsigned}"
    signer = find_signer_of(document)
    return f"signed by {signer}" if signer else "the signature is wrong: it is not of this certificate"


def read_document(file: Path) -> Document:
    """Read a certificate. Raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Document)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError("FV0002", f"{file} is not a certificate of edge-client certify: {error}") from None


def make_page(document: Document) -> str:
    """Write the certificate for people."""
    one = document.certificate
    host = one.profile.host
    lines = [f"# {host.board or 'unknown board'}", ""]
    lines += [
        f"{one.made}, fedvit {one.profile.software}, {host.engine} {host.engine_version}, Python {host.python}.",
        "",
    ]
    lines += ["Nothing is wrong with it." if not one.faults else "Faults:", ""]
    lines += [f"- {fault}" for fault in one.faults] + [""] * bool(one.faults)
    lines += ["| part | result |", "|---|---|"]
    lines += [f"| {name} | {value.replace('|', '/')} |" for name, value in _list_parts(document)]
    lines += ["", "## doctor", ""]
    lines += [f"- {finding.level}: {finding.check}: {finding.what}" for finding in one.doctor]
    if one.heat.celsius:
        lines += ["", "## Temperature", "", "| seconds | C |", "|---|---|"]
        lines += [f"| {seconds:.0f} | {degrees:.1f} |" for seconds, degrees in one.heat.celsius]
    return "\n".join([*lines, ""])


def _list_parts(document: Document) -> Iterator[tuple[str, str]]:
    one = document.certificate
    host, heat, memory = one.profile.host, one.heat, one.memory
    yield "processor", f"{host.processor or host.machine}, {host.cores} cores, {one.profile.threads} threads"
    yield "system", f"{host.os or 'unknown'}, kernel {host.kernel}"
    for figures in one.programs:
        word = "right" if figures.right else "wrong"
        peak = figures.use.peak_rss_bytes
        shown = f", {format_bytes(peak)}" if peak else ""
        yield f"step, {figures.name}", f"{_describe_step(figures)}, loss {figures.loss:.4f} ({word}){shown}"
    fits = f"fits, at most {format_bytes(memory.peak_bytes or 0)}" if memory.fits else "does not fit"
    refused = "ends the task alone" if memory.refused else "was exceeded"
    yield "memory", f"a limit of {format_bytes(memory.limit_bytes)}: {fits}; one that is too small {refused}"
    yield "energy", _describe_energy(one)
    yield "temperature", f"{_describe_heat(one)}; {_describe_slowing(one)}, in {format_seconds(heat.seconds)}"
    yield "kill -9", _describe_survival(one)
    yield "signature", describe_signature(document)


def make_row(document: Document) -> str:
    """Write the row of docs/boards.md."""
    one = document.certificate
    host = one.profile.host
    programs = {figures.name: figures for figures in one.programs}
    steps = " / ".join(
        _describe_step(programs[name]) if name in programs else "-" for name in ("float", "int8", "int8 with kernels")
    )
    peak = max((figures.use.peak_rss_bytes or 0 for figures in one.programs), default=0)
    signed = "yes" if find_signer_of(document) else "no"
    cells = (
        host.board or "unknown", host.processor or host.machine, host.os or "unknown", steps, format_bytes(peak),
        _describe_energy(one), _describe_heat(one), _describe_survival(one), signed,
    )  # fmt: skip
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _describe_step(figures: ProgramFigures) -> str:
    return "not measured" if figures.use.step_s is None else format_seconds(figures.use.step_s)


def _describe_energy(one: BoardCertificate) -> str:
    use = one.heat.use
    if use.energy_j is None or not use.steps:
        return "no sensor"
    return f"{use.energy_j / use.steps:.3f} J a step ({use.energy_source})"


def _describe_heat(one: BoardCertificate) -> str:
    degrees = [celsius for _, celsius in one.heat.celsius]
    return f"{degrees[0]:.0f} to {max(degrees):.0f} C" if degrees else "no sensor"


def _describe_slowing(one: BoardCertificate) -> str:
    use = one.heat.use
    slowing = {None: "throttling is not measured", True: "throttled", False: "not throttled"}[use.throttled]
    return slowing if use.sustained is None else f"{slowing}, the last steps took {use.sustained:.2f} of the first"


def _describe_survival(one: BoardCertificate) -> str:
    survival = one.survival
    if not survival.resumed:
        return f"{survival.rounds} rounds after {survival.kills} kills"
    return f"{survival.kills} kills, {'same bits' if survival.same else 'other numbers'}"
