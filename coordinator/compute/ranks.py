"""The server's training in several processes, one per accelerator; torch calls each of them a rank."""

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

from coordinator.compute.closing import Closing, Placement, RankSetup
from coordinator.compute.integrity import VerifiedBlobs
from coordinator.compute.pipes import close, read_frame, write_raw
from coordinator.compute.process import (
    DEATHS,
    END_S,
    Answered,
    Child,
    Raised,
    Reply,
    WorkerProgress,
    exception_of,
    how_it_ended,
)
from coordinator.compute.rank_loop import LOOPBACK, PATIENCE
from coordinator.record.tables import SavedState
from fedvit.errors import DeviceTrouble, FedvitError
from fedvit.methods.base import ServerRule
from fedvit.models.vit import PatchViT

log = logging.getLogger(__name__)


def spawn() -> Child:
    """Start a process, which ends with this one."""
    command = [sys.executable, "-P", "-m", "coordinator.compute.rank"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class _Died(Exception):
    """A process ended while a round was closed."""


class _RankReply(NamedTuple):
    rank: int
    reply: Reply | None  # None: its pipe ended


class Ranks:
    """The processes of one run; they end with this process, also after `kill -9`.

    If one of them dies, new processes repeat the server step. `progress` receives the current step, `warn` the deaths.
    """

    def __init__(
        self,
        accelerators: tuple[str, ...],  # the torch device of each
        rule: ServerRule,
        vit: PatchViT,
        blobs: VerifiedBlobs,
        progress: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._accelerators = accelerators
        self._rule, self._vit, self._blobs = rule, vit, blobs
        self._progress, self._warn = progress, warn
        self._children: list[Child] = []
        self._replies: SimpleQueue[_RankReply] = SimpleQueue()
        self._store: TCPStore | None = None  # where the processes meet

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def start(self) -> None:
        """Start the processes early, so that they load torch in the meantime."""
        try:
            self._start()
        except _Died:
            self.stop()  # `close_round` starts others

    def _start(self) -> None:
        self._replies = SimpleQueue()  # replies of earlier processes are ignored
        with socket.socket() as meeting:
            meeting.bind((LOOPBACK, 0))
            port: int = meeting.getsockname()[1]
            # without our own socket it would listen on all interfaces
            self._store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=PATIENCE,
                master_listen_fd=meeting.detach(),
            )  # fmt: skip
        for rank in range(len(self._accelerators)):
            child = spawn()
            self._children.append(child)
            threading.Thread(
                target=_listen, args=(rank, child, self._replies), name=f"rank {rank}", daemon=True
            ).start()
        for rank, device in enumerate(self._accelerators):
            placement = Placement(device, rank, len(self._accelerators))
            self._send(rank, RankSetup(placement, port, self._blobs.folder, self._rule, self._vit))
        log.info("server training", extra={"accelerators": self._accelerators, "pids": self.pids})

    def stop(self) -> None:
        """Kill the processes, without waiting for a step that is being worked on."""
        for child in self._children:
            child.kill()
            child.wait()
            if child.stdin is not None:
                close(child.stdin)
        self._children, self._store = [], None

    def close_round(self, closing: Closing) -> tuple[SavedState, dict[str, float]]:
        """Close a round with all ranks, as `Closing.run` does.

        Raises the same errors, FedvitError if a process fails, and DeviceTrouble after DEATHS deaths.
        """
        for deaths in range(1, DEATHS + 1):
            try:
                if not self._children:
                    self._start()
                return self._close(closing)
            except _Died as died:
                self.stop()
                ending = str(died)
                if deaths < DEATHS:
                    self._warn(f"{ending}; the server step of round {closing.round} is repeated, nothing is lost")
            except BaseException:
                self.stop()  # otherwise the remaining processes would wait for the failed one
                raise
        raise DeviceTrouble(
            "FV1511",
            f"round {closing.round} could not be closed: a process of the server's training ended {DEATHS} times, the "
            f"last time {ending}. With SIGKILL it was probably out of memory: see the system's log, or "
            f"choose fewer processes with `accelerator`",
        )

    def _close(self, closing: Closing) -> tuple[SavedState, dict[str, float]]:
        for rank in range(len(self._children)):
            self._send(rank, closing)
        values: dict[int, msgspec.Raw] = {}
        while len(values) < len(self._children):
            rank, reply = self._replies.get()
            match reply:
                case None:
                    raise self._died(rank)
                case WorkerProgress(text):
                    self._progress(text)
                case Raised():
                    self._report(reply.damaged)
                    raise self._make_error(rank, reply)
                case Answered():
                    self._report(reply.damaged)
                    values[rank] = reply.value
        return msgspec.msgpack.decode(values[0], type=tuple[SavedState, dict[str, float]])

    def _send(self, rank: int, message: RankSetup | Closing) -> None:
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

    def _make_error(self, rank: int, raised: Raised) -> Exception:
        if raised.kind:
            return exception_of(raised, None)
        try:  # if a peer has died, this rank fails as well and may report it first
            while True:
                answer = self._replies.get(timeout=END_S)
                if answer.reply is None:
                    return self._died(answer.rank)
        except Empty:
            return FedvitError("FV1511", f"{self._name(rank)} failed: {raised.text}; the run's log has the traceback")

    def _died(self, rank: int) -> _Died:
        child = self._children[rank]
        try:
            code = child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        return _Died(f"{self._name(rank)} ended with {how_it_ended(code)}")

    def _name(self, rank: int) -> str:
        """The process as the operator can find it."""
        device, pid = self._accelerators[rank], self._children[rank].pid
        return f"rank {rank} of {len(self._accelerators)} of the server's training ({device}, process {pid})"


def _listen(rank: int, child: Child, replies: "SimpleQueue[_RankReply]") -> None:
    assert child.stdout is not None
    with child.stdout as pipe:
        while raw := read_frame(pipe):
            replies.put(_RankReply(rank, msgspec.msgpack.decode(raw, type=Reply)))
    replies.put(_RankReply(rank, None))
