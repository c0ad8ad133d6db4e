"""A run as its rooms share it: what it is, and how far it has got, which only the run itself moves on."""

from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.config import RunConfig
from coordinator.record.integrity import SoundBlobs
from coordinator.record.store import Store
from coordinator.record.tables import SavedState
from fedvit.errors import LinkDown
from fedvit.program import Program, decode_program


@dataclass
class RunState:
    """`say(line)` is for the operator to read later, `doing` for who looks now."""

    run: str
    config: RunConfig
    store: Store
    blobs: SoundBlobs
    say: Callable[[str], None]
    classes: tuple[str, ...]  # empty while the first devices are gathered, whose they will be
    number: int = 1  # the round that is asked, or was asked last
    doing: str = ""
    saved: SavedState | None = None  # the newest
    _programs: dict[str, Program] = field(default_factory=dict)  # by digest

    def newest(self) -> SavedState:
        if self.saved is None:
            raise LinkDown("the run is not prepared yet")
        return self.saved

    def program(self, digest: str) -> Program:
        """A Program that is among the blobs. Raises DamagedBlob."""
        if digest not in self._programs:
            self._programs[digest] = decode_program(self.blobs.get(digest))
        return self._programs[digest]

    def set_doing(self, text: str) -> None:
        self.doing = text
