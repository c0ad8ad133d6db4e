"""A device that asks for its adoption, and the person in front of it."""

import threading
from dataclasses import dataclass, field
from queue import SimpleQueue

from edge_client.link.adoption import Agreed, ask_adoption
from fedvit.errors import FedvitError
from tests.support.waiting import WAIT_S

LOCALHOST = "127.0.0.1"


@dataclass
class Device:
    """A device that asks for adoption in a thread of its own, and the person in front of it."""

    port: int
    name: str = "pi-3"
    says_yes: bool = True
    shown: "SimpleQueue[Agreed]" = field(default_factory=SimpleQueue)
    outcome: "SimpleQueue[str | FedvitError]" = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self) -> None:
        try:
            self.outcome.put(ask_adoption(LOCALHOST, self.port, self.name, self.shown.put, lambda _: self.says_yes))
        except FedvitError as error:
            self.outcome.put(error)

    def read_code(self) -> str:
        return self.shown.get(timeout=WAIT_S).code

    def end(self) -> str | FedvitError:
        return self.outcome.get(timeout=WAIT_S)
