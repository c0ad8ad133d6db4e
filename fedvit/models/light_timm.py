"""Imports timm without torch's compiler, which a process needs only if it compiles or traces.

timm and torchvision ask for it while they are imported: five functions of timm are to be left out of what it compiles,
and one of torchvision asks it a question when it is called. It is 860 modules, 1.1 s of a processor and 140 MB, as much
as all the rest that a server's process imports, and a run whose graphs are in the cache never uses it.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch as torch  # itself, which does not ask for it

COMPILER = "torch._dynamo"
PLACES = (COMPILER, f"{COMPILER}.utils")


class _Later(ModuleType):
    """In the compiler's place while timm is imported; asked for anything else, it makes room for the real one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of every module, by what looks for the source of a function
            raise AttributeError(name)
        _make_room()
        return getattr(import_module(self.__name__), name)


def _make_room() -> None:
    for place in PLACES:
        if isinstance(sys.modules.get(place), _Later):
            del sys.modules[place]


def _leave_out(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """`torch.compiler.disable` for functions that nothing here compiles."""
    return function


def _is_compile_supported(device: str) -> Any:
    return import_module(PLACES[1]).is_compile_supported(device)


def _import_timm() -> None:
    compiler, utils = (_Later(place) for place in PLACES)
    spec = find_spec(COMPILER)
    assert spec is not None
    vars(compiler).update(disable=_leave_out, utils=utils, __path__=spec.submodule_search_locations)
    vars(utils).update(is_compile_supported=_is_compile_supported)
    sys.modules.update(zip(PLACES, (compiler, utils), strict=True))
    try:
        import_module("timm")
    finally:
        _make_room()


if not {COMPILER, "timm"} & sys.modules.keys():
    _import_timm()
