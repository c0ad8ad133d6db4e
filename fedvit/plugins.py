"""Plugins: parts that installed packages declare by entry points, such as methods, models and partitions.

Packages are known by their metadata; nothing of one is imported before its plugin is used. Only programs of an operator
or a researcher look for plugins, never a device: it runs nothing because a coordinator named it.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple, NoReturn, TypeVar

from fedvit.choices import did_you_mean
from fedvit.errors import ConfigError, FedvitError

T = TypeVar("T")


class PluginKind(NamedTuple):
    """A kind of plugin."""

    noun: str  # in messages
    group: str  # of the entry points


METHODS = PluginKind("method", "fedvit.methods")
MODELS = PluginKind("model", "fedvit.models")
OPERATORS = PluginKind("operator", "fedvit.operators")
READERS = PluginKind("reader", "fedvit.readers")
PARTITIONS = PluginKind("partition", "fedvit.partitions")
SELECTORS = PluginKind("selector", "fedvit.selectors")
AGGREGATORS = PluginKind("aggregator", "fedvit.aggregators")
SERVER_OPTIMIZERS = PluginKind("server optimizer", "fedvit.server_optimizers")
KINDS = (METHODS, MODELS, OPERATORS, READERS, PARTITIONS, SELECTORS, AGGREGATORS, SERVER_OPTIMIZERS)


@cache
def read_entries(kind: PluginKind) -> Mapping[str, list[EntryPoint]]:
    """Return the entry points of a kind by name. Nothing of their packages is imported."""
    declared: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in entry_points(group=kind.group):
        declared[entry.name].append(entry)
    return dict(declared)


def find_entry(kind: PluginKind, name: str, own: Collection[str]) -> EntryPoint | None:
    """Return the entry point of a name; None if no package declares it. `own` are fedvit's names of that kind.

    Raises ConfigError if more than one package has the name: a package replaces nothing of another one.
    """
    declared = read_entries(kind).get(name, [])
    packages = [*(["fedvit"] if name in own else []), *sorted(map(package_of, declared))]
    if declared and len(packages) > 1:
        raise ConfigError(
            "FV1102",
            f"{kind.noun} {name!r} is in more than one package: {', '.join(packages)}; uninstall all but one, or "
            f"rename the entry point in one of them",
        )
    return declared[0] if declared else None


def package_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "(unknown)"


def list_names(kind: PluginKind, own: Collection[str]) -> list[str]:
    """List fedvit's names of a kind, then those of packages, of which some may be unusable."""
    return [*own, *sorted(read_entries(kind).keys() - set(own))]


def check_value(kind: PluginKind, key: str, name: str, own: Collection[str], code: str = "FV1004") -> None:
    """Raise ConfigError unless a key's value is one of fedvit's names, or a package declares it."""
    if name not in own and name not in read_entries(kind):
        names = list_names(kind, sorted(own))
        raise ConfigError(
            code, f"{key} = {name!r}: invalid value; allowed are {' | '.join(names)}{did_you_mean(name, names)}"
        )


def load_class(kind: PluginKind, entry: EntryPoint, base: type[T], needs: Collection[str] = ()) -> type[T]:
    """Import a plugin that is a class. Raises ConfigError if it is not one of `base`, or not complete.

    `needs` are attributes that it must have beside all that is abstract in `base`.
    """
    loaded = load(kind, entry)
    if not (inspect.isclass(loaded) and issubclass(loaded, base)):
        refuse(
            kind, entry, f"is not a {kind.noun}: expected a class derived from {base.__module__}.{base.__qualname__}"
        )
    abstract: Collection[str] = getattr(loaded, "__abstractmethods__", ())
    if missing := [*sorted(abstract), *(name for name in needs if not hasattr(loaded, name))]:
        refuse(kind, entry, f"is not complete: it must define {', '.join(missing)}")
    return loaded


def make(kind: PluginKind, entry: EntryPoint, maker: Callable[[], T]) -> T:
    """Call what a plugin is made with. Raises ConfigError if that fails."""
    try:
        return maker()
    except FedvitError:
        raise
    except Exception as error:  # whatever a class of somebody else raises
        raise ConfigError(
            "FV1102", f"{describe(kind, entry)} cannot be made: {type(error).__name__}: {error}"
        ) from error


def load_object(kind: PluginKind, entry: EntryPoint, of: type[T]) -> T:
    """Import a plugin that is an object. Raises ConfigError if it is not one of the class `of`."""
    loaded = load(kind, entry)
    if not isinstance(loaded, of):
        refuse(kind, entry, f"is not a {kind.noun}: expected a {of.__module__}.{of.__qualname__}")
    return loaded


def load_function(kind: PluginKind, entry: EntryPoint) -> Callable[..., Any]:
    """Import a plugin that is a function. Raises ConfigError if it is not one."""
    loaded = load(kind, entry)
    if not inspect.isfunction(loaded):
        refuse(kind, entry, f"is not a {kind.noun}: expected a function")
    return loaded


def load(kind: PluginKind, entry: EntryPoint) -> Any:
    """Import a plugin, whatever it is. Raises ConfigError, naming package and entry, if that fails."""
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # whatever a module of somebody else raises
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError("FV1102", f"{describe(kind, entry)} {reason}") from error


def refuse(kind: PluginKind, entry: EntryPoint, reason: str, code: str = "FV1102") -> NoReturn:
    """Raise ConfigError, naming the plugin and its package."""
    raise ConfigError(code, f"{describe(kind, entry)} {reason}")


def describe(kind: PluginKind, entry: EntryPoint) -> str:
    """Describe a plugin for a message.

    >>> describe(METHODS, EntryPoint("mine", "mypackage:Mine", "fedvit.methods"))
    "method 'mine' of package (unknown): mypackage:Mine"
    """
    return f"{kind.noun} {entry.name!r} of package {package_of(entry)}: {entry.value}"
