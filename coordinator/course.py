"""A run as its rooms share it: what it is, and how far it has got, which only the run itself moves on."""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.checkpoint import load_state
from coordinator.config import RunConfig
from coordinator.integrity import SoundBlobs
from coordinator.planner import Plan
from coordinator.store import Store
from coordinator.tables import SavedState
from fedvit.errors import LinkDown
from fedvit.methods.base import ServerState


@dataclass
class Course:
    """`say(line)` is for the operator to read later, `doing` for who looks now."""

    run: str
    config: RunConfig
    store: Store
    blobs: SoundBlobs
    say: Callable[[str], None]
    classes: tuple[str, ...]  # empty while the first devices are gathered, whose they will be
    number: int = 1  # the round that is asked, or was asked last
    doing: str = ""
    made: Plan | None = None
    saved: SavedState | None = None  # the newest

    @property
    def plan(self) -> Plan:
        if self.made is None:
            raise LinkDown("the run is not prepared yet")
        return self.made

    def state(self) -> ServerState:
        """The newest state, as tensors."""
        return load_state(self.newest(), self.blobs, self.plan.values)

    def newest(self) -> SavedState:
        if self.saved is None:
            raise LinkDown("the run is not prepared yet")
        return self.saved

    def set_doing(self, text: str) -> None:
        self.doing = text
