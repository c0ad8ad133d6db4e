"""What a power cut may leave on a disk: everything that was synced, and any part of what was not.

`recorded` notes what some code does to a folder, call by call. `after_power_cut` then enumerates what can lie there
after a cut at any moment: of the changes to a folder that were not synced, any subset survived; a file that was not
synced is empty or garbage. That is less than any common file system promises.
"""

import itertools
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

Tree = dict[str, bytes | None]
"""Path below the folder -> content; None: a folder."""
GARBAGE = (b"", b"\xde\xad" * 40)


class Op(NamedTuple):
    """A change, or a sync, of `path`; `to` is a rename's new name, `content` what a sync made durable."""

    kind: str  # create, mkdir, rename, remove, rmdir, sync, syncdir
    path: str
    to: str = ""
    content: bytes = b""


_listening: list[tuple[Path, list[Op]]] = []


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    if not _listening or event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        return
    folder, ops = _listening[-1]

    def below(path: object, dir_fd: object = -1) -> str | None:
        if not isinstance(path, str | Path):
            return None
        base = Path(os.readlink(f"/proc/self/fd/{dir_fd}")) if isinstance(dir_fd, int) and dir_fd >= 0 else Path()
        where = base / path
        return str(where.relative_to(folder)) if where.is_relative_to(folder) else None

    path = below(arguments[0], arguments[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1)
    if path is None:
        return
    if event == "open":
        flags = arguments[2]
        if isinstance(flags, int) and flags & os.O_CREAT and not (folder / path).exists():
            ops.append(Op("create", path))
    elif event == "os.rename":
        ops.append(Op("rename", path, below(arguments[1]) or ""))
    elif event != "os.mkdir" or not (folder / path).exists():
        ops.append(Op({"os.mkdir": "mkdir", "os.remove": "remove", "os.rmdir": "rmdir"}[event], path))


sys.addaudithook(_heard)


@contextmanager
def recorded(folder: Path) -> Iterator[list[Op]]:
    """What happens below `folder` meanwhile; it is all in this process."""
    ops: list[Op] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_relative_to(folder):
            name = str(path.relative_to(folder))
            is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
            ops.append(Op("syncdir", name) if is_folder else Op("sync", name, content=path.read_bytes()))

    _listening.append((folder, ops))
    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield ops
    finally:
        os.fsync = real
        _listening.pop()


def tree(folder: Path) -> Tree:
    """What lies below a folder now."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def after_power_cut(before: Tree, ops: list[Op]) -> Iterator[tuple[int, Tree]]:
    """(calls that were done, what may lie there then), each state once; `before` was all durable."""
    seen: set[frozenset[tuple[str, bytes | None]]] = set()
    for done in range(len(ops) + 1):
        unsure = _find_unsynced(ops[:done])
        assert len(unsure) <= 12, "too many changes are open at once to try all subsets"
        for survived in itertools.product((True, False), repeat=len(unsure)):
            lost = {index for index, kept in zip(unsure, survived, strict=True) if not kept}
            for garbage in GARBAGE:
                state = _replay(before, [op for index, op in enumerate(ops[:done]) if index not in lost], garbage)
                key = frozenset((path, content) for path, content in state.items())
                if key not in seen or done == len(ops):
                    seen.add(key)
                    yield done, state


def _find_unsynced(ops: list[Op]) -> list[int]:
    """Changes to folders that no sync of their folder followed."""
    open_changes: dict[int, str] = {}
    for index, op in enumerate(ops):
        if op.kind == "syncdir":
            open_changes = {at: folder for at, folder in open_changes.items() if folder != op.path}
        elif op.kind != "sync":
            open_changes[index] = str(Path(op.path).parent)
    return list(open_changes)


def _replay(before: Tree, ops: list[Op], garbage: bytes) -> Tree:
    """The tree after these changes alone; what happened inside a folder whose name was lost is lost, too."""
    state = dict(before)
    for op in ops:
        parent = str(Path(op.path).parent)
        if parent != "." and parent not in state:
            continue
        match op.kind:
            case "mkdir":
                state[op.path] = None
            case "create":
                state[op.path] = garbage
            case "sync" if op.path in state:
                state[op.path] = op.content
            case "rename" if op.path in state:
                for path in [path for path in state if path == op.path or path.startswith(f"{op.path}/")]:
                    state[op.to + path.removeprefix(op.path)] = state.pop(path)
            case "remove" | "rmdir":
                for path in [path for path in state if path == op.path or path.startswith(f"{op.path}/")]:
                    del state[path]
    return state


def write_tree(state: Tree, folder: Path) -> None:
    """Put a tree into a folder that is not there yet."""
    folder.mkdir()
    for path, content in sorted(state.items()):
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
