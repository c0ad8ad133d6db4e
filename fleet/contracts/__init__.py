"""Contracts of plugins: laws that a package's methods, partitions and other parts must obey, as fedvit's own do."""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution

from msgspec import Struct

from fedvit import plugins
from fedvit.errors import ConfigError
from fedvit.plugins import PluginKind
from fleet.contracts.laws import BrokenLaw, Law

LAWS: dict[PluginKind, str] = {
    plugins.METHODS: "fleet.contracts.methods",
    plugins.MODELS: "fleet.contracts.models",
    plugins.OPERATORS: "fleet.contracts.operators",
    plugins.READERS: "fleet.contracts.readers",
    plugins.PARTITIONS: "fleet.contracts.partitions",
    plugins.SELECTORS: "fleet.contracts.selectors",
    plugins.AGGREGATORS: "fleet.contracts.aggregators",
    plugins.SERVER_OPTIMIZERS: "fleet.contracts.server_optimizers",
}
"""Modules with the laws of each kind; they are imported when a package has a plugin of that kind."""


class LawResult(Struct, frozen=True):
    """The result of one law for one plugin."""

    kind: str
    name: str
    law: str
    broken: str | None  # reason; None: the law holds


def find_plugins(package: str) -> list[tuple[PluginKind, str]]:
    """List the plugins of an installed package. Raises ConfigError if it is not installed, or has none."""
    try:
        entries = distribution(package).entry_points
    except (PackageNotFoundError, ValueError):
        raise ConfigError("FV2485", f"package {package!r} is not installed here") from None
    kinds = {kind.group: kind for kind in plugins.KINDS}
    found = sorted((entry.group, entry.name) for entry in entries if entry.group in kinds)
    if not found:
        raise ConfigError("FV2485", f"package {package!r} declares no plugin; groups are: {', '.join(kinds)}")
    return [(kinds[group], name) for group, name in found]


def check_plugin(kind: PluginKind, name: str) -> Iterator[LawResult]:
    """Check the laws of one plugin, one after the other."""
    laws: tuple[Law, ...] = import_module(LAWS[kind]).LAWS
    for law in laws:
        yield LawResult(kind.noun, name, state_law(law), find_break(law, name))


def find_break(law: Law, name: str) -> str | None:
    """Find the reason why a law does not hold for a plugin; None if it does."""
    try:
        law(name)
    except BrokenLaw as error:
        return str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the code of a package raises breaks the law
        return f"{type(error).__name__}: {error}"
    return None


def state_law(law: Law) -> str:
    """Return the statement of a law: the first line of its docstring."""
    return (law.__doc__ or "").partition("\n")[0].rstrip(".")
