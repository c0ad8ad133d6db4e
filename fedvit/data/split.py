"""Split the images of one device into training and test images."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from fedvit.data.images import Flags, Indices
from fedvit.errors import ConfigError, Damaged
from fedvit.files import atomic_write, name_failure, storage_failed

log = logging.getLogger(__name__)

_MARK = b',"digest":'


def split_train_test(
    indices: Indices, labels: Indices, test_share: float, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Split every class into (train, test), both ascending.

    `indices` are those of one device, `labels` those of the whole data set. Of n samples of a class,
    n * test_share go to test, rounded, but at least one and never all; a class with a single sample is
    train only. A share of 0 leaves test empty. Raises ConfigError when the share is not in [0, 1).

    >>> train, test = split_train_test(np.arange(6), np.array([0, 0, 0, 0, 1, 2]), 0.25, np.random.default_rng(0))
    >>> len(train), len(test)
    (5, 1)
    """
    if not 0 <= test_share < 1:
        raise ConfigError("FV1408", f"test share is {test_share}, expected a number in [0, 1)")
    mine = labels[indices]
    chosen = np.zeros(len(indices), dtype=np.bool_)
    if test_share:
        for label in np.unique(mine):
            members = rng.permutation(np.flatnonzero(mine == label))
            wanted = int(len(members) * test_share + 0.5)  # round() would take 2 of 2.5 and 4 of 3.5
            chosen[members[: min(max(wanted, 1), len(members) - 1)]] = True
    return np.sort(indices[~chosen]), np.sort(indices[chosen])


class RandomSplit(NamedTuple):
    """The split of a folder that does not change: the same folder is always split in the same way."""

    test_share: float = 0.2  # of each class
    seed: int = 0

    def choose_tests(self, names: Sequence[str], labels: Indices) -> Flags:
        """Return which images test, (n,); `names` are their paths within the folder."""
        rng = np.random.default_rng(self.seed)
        _, tests = split_train_test(np.arange(len(names), dtype=np.int64), labels, self.test_share, rng)
        return np.isin(np.arange(len(names)), tests)


DEFAULT_SPLIT = RandomSplit()


class KeptSplit(msgspec.Struct, frozen=True):
    """The split of a folder that grows: which image tests is decided once, by its name, and never changes.

    The images of the first start are split class by class (`split_train_test`). Each later one tests if a hash of its
    name is below `test_share`; the images of the first start for which that rule says otherwise are the `exceptions`.
    """

    test_share: float
    exceptions: frozenset[str] = frozenset()  # digests of names, so that the file says nothing about the images

    @classmethod
    def load(cls, file: Path, test_share: float, report: Callable[[str], object] = str) -> Self | None:
        """The split in a file, or else in its copy; None if there is none, or it was made for another share.

        A damaged file is logged, and its description passed to `report`. Raises Damaged if both are, StorageFailed.
        """
        damaged = []
        for each in _list_files(file):
            try:
                kept = cls._decode(each.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise storage_failed(f"cannot read {each}", error) from error
            except (msgspec.MsgspecError, ValueError) as error:
                damaged.append(f"{each} is damaged: {error}")
                continue
            for what in damaged:
                log.error("damaged, its copy is used", extra={"what": what})
                report(what)
            return kept if kept.test_share == test_share else None
        if damaged:
            both = " and ".join(map(str, _list_files(file)))
            hint = f"restore it from a backup, or remove {both}: images are split anew"
            raise Damaged("FV1704", f"{damaged[0]}; {hint}")
        return None

    @classmethod
    def _decode(cls, content: bytes) -> Self:
        """Raises MsgspecError, ValueError for a damaged file. Those of older versions have no digest."""
        before, mark, _ = content.rpartition(_MARK)
        if mark and _add_digest(before + b"}") != content:
            raise ValueError("it does not have its digest")
        return msgspec.json.decode(content, type=cls)

    @classmethod
    def of(cls, train: Iterable[str], test: Iterable[str], test_share: float) -> Self:
        """The split that leaves images with these names where they are."""
        rule = cls(test_share)
        exceptions = [name for name in train if rule.is_test(name)] + [name for name in test if not rule.is_test(name)]
        return cls(test_share, frozenset(map(_digest, exceptions)))

    def choose_tests(self, names: Sequence[str], labels: Indices) -> Flags:
        """Return which images test, (n,); `names` are their paths within the folder."""
        return np.array([self.is_test(name) for name in names], dtype=np.bool_)

    def is_test(self, name: str) -> bool:
        """Return whether this is a test image; `name` is its path within the folder."""
        digest = _digest(name)
        return (int(digest, 16) < self.test_share * 2**64) != (digest in self.exceptions)

    def save(self, file: Path) -> None:
        """Write the file and its copy, unless they are as they should be. Raises StorageFailed."""
        content = _add_digest(msgspec.json.encode(self, order="deterministic"))
        for each in _list_files(file):
            with name_failure(f"cannot read {each}"):
                is_whole = each.is_file() and each.read_bytes() == content
            if not is_whole:
                atomic_write(each, content)


def _list_files(file: Path) -> tuple[Path, Path]:
    """Return a file and its copy."""
    return file, file.with_suffix(".copy.json")


def _add_digest(content: bytes) -> bytes:
    """Add the digest of a JSON object as its last field, which older versions pass over."""
    return content[:-1] + _MARK + f'"{_digest(content)}"}}'.encode()


def _digest(content: str | bytes) -> str:
    return hashlib.blake2b(os.fsencode(content), digest_size=8).hexdigest()
