"""The server's training in several processes, one for each accelerator; torch calls each of them a rank."""

import logging
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coordinator.compute.closing import Closing, Joining, Place
from coordinator.compute.pipes import close, read_frame, write_raw
from coordinator.compute.process import (
    DEATHS,
    END_S,
    Answered,
    Child,
    Doing,
    Raised,
    Reply,
    exception_of,
    how_it_ended,
)
from coordinator.compute.rank import LOOPBACK, PATIENCE
from coordinator.record.integrity import SoundBlobs
from coordinator.record.tables import SavedState
from fedvit.errors import DeviceTrouble, FedvitError
from fedvit.methods.base import ServerRule
from fedvit.models.vit import PatchViT

log = logging.getLogger(__name__)


def spawn() -> Child:
    """A fresh process, which ends with this one."""
    command = [sys.executable, "-m", "coordinator.compute.rank"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class _Died(Exception):
    """A process ended while a round was closed."""


class _Heard(NamedTuple):
    rank: int
    reply: Reply | None  # None: its pipe ended


class Ranks:
    """The processes of one run, which `start` starts; they end with this process, also after `kill -9`.

    A round during which one of them dies is closed again by new ones. `say` hears what is being done, `warn` of deaths.
    """

    def __init__(
        self,
        accelerators: tuple[str, ...],  # the torch device of each
        rule: ServerRule,
        vit: PatchViT,
        blobs: SoundBlobs,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._accelerators = accelerators
        self._rule, self._vit, self._blobs = rule, vit, blobs
        self._say, self._warn = say, warn
        self._children: list[Child] = []
        self._heard: SimpleQueue[_Heard] = SimpleQueue()
        self._store: TCPStore | None = None  # where they find each other

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def start(self) -> None:
        """Let them load torch while something else is done."""
        try:
            self._start()
        except _Died:
            self.stop()  # `close_round` starts others

    def _start(self) -> None:
        self._heard = SimpleQueue()  # what an earlier process still says is not heard
        with socket.socket() as meeting:
            meeting.bind((LOOPBACK, 0))
            port: int = meeting.getsockname()[1]
            # without a socket of ours it would listen on all interfaces
            self._store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=PATIENCE,
                master_listen_fd=meeting.detach(),
            )  # fmt: skip
        for rank in range(len(self._accelerators)):
            child = spawn()
            self._children.append(child)
            threading.Thread(target=_listen, args=(rank, child, self._heard), name=f"rank {rank}", daemon=True).start()
        for rank, device in enumerate(self._accelerators):
            place = Place(device, rank, len(self._accelerators))
            self._send(rank, Joining(place, port, self._blobs.folder, self._rule, self._vit))
        log.info("server training", extra={"accelerators": self._accelerators, "pids": self.pids})

    def stop(self) -> None:
        """What is being done is not waited for."""
        for child in self._children:
            child.kill()
            child.wait()
            if child.stdin is not None:
                close(child.stdin)
        self._children, self._store = [], None

    def close_round(self, closing: Closing) -> tuple[SavedState, dict[str, float]]:
        """See `Closing.done`.

        Raises what that raises, FedvitError where a process fails, and DeviceTrouble after DEATHS.
        """
        for deaths in range(1, DEATHS + 1):
            try:
                if not self._children:
                    self._start()
                return self._closed(closing)
            except _Died as died:
                self.stop()
                said = str(died)
                if deaths < DEATHS:
                    self._warn(f"{said}; round {closing.round} is closed again, nothing is lost")
            except BaseException:
                self.stop()  # the others would wait for the one that failed
                raise
        raise DeviceTrouble(
            f"round {closing.round} could not be closed: {DEATHS} times a process of the server's training ended, at "
            f"last {said}. With SIGKILL it was probably out of memory: see the system's log, or take fewer processes "
            f"by `accelerator`"
        )

    def _closed(self, closing: Closing) -> tuple[SavedState, dict[str, float]]:
        for rank in range(len(self._children)):
            self._send(rank, closing)
        values: dict[int, msgspec.Raw] = {}
        while len(values) < len(self._children):
            rank, reply = self._heard.get()
            match reply:
                case None:
                    raise self._died(rank)
                case Doing(text):
                    self._say(text)
                case Raised():
                    self._report(reply.damaged)
                    raise self._failed(rank, reply)
                case Answered():
                    self._report(reply.damaged)
                    values[rank] = reply.value
        return msgspec.msgpack.decode(values[0], type=tuple[SavedState, dict[str, float]])

    def _send(self, rank: int, message: Joining | Closing) -> None:
        pipe = self._children[rank].stdin
        assert pipe is not None
        try:
            write_raw(pipe, pickle.dumps(message))
        except OSError:
            raise self._died(rank) from None

    def _report(self, damaged: list[str]) -> None:
        for digest in damaged:
            self._blobs.report(digest)

    # --- failures -----------------------------------------------------------------------------------------

    def _failed(self, rank: int, raised: Raised) -> Exception:
        if raised.kind:
            return exception_of(raised, None)
        try:  # one whose peer has died fails as well, and may say so first
            while True:
                heard = self._heard.get(timeout=END_S)
                if heard.reply is None:
                    return self._died(heard.rank)
        except Empty:
            return FedvitError(f"{self._name(rank)} failed: {raised.text}; the run's log has the traceback")

    def _died(self, rank: int) -> _Died:
        child = self._children[rank]
        try:
            code = child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        return _Died(f"{self._name(rank)} ended with {how_it_ended(code)}")

    def _name(self, rank: int) -> str:
        """As an operator finds it."""
        device, pid = self._accelerators[rank], self._children[rank].pid
        return f"rank {rank} of {len(self._accelerators)} of the server's training ({device}, process {pid})"


def _listen(rank: int, child: Child, heard: "SimpleQueue[_Heard]") -> None:
    assert child.stdout is not None
    with child.stdout as pipe:
        while raw := read_frame(pipe):
            heard.put(_Heard(rank, msgspec.msgpack.decode(raw, type=Reply)))
    heard.put(_Heard(rank, None))
