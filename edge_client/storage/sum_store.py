"""Results that are added up in secret: kept in the vault, with what the device must remember of the sum.

Layout: `RUN/sum-train-7/{payload.safetensors,SUMS,ATTEMPT}`, of the newest round of each kind. With a key, tensors and
attempt are encrypted.
"""

import contextlib
import shutil
import threading
from pathlib import Path

import msgspec

from edge_client.storage.round_files import path_in_vault
from edge_client.storage.sums import Sums, add_digest, check_digest, read_file, write_sums
from edge_client.storage.vault import Vault
from fedvit.errors import BadPayload, Damaged
from fedvit.files import atomic_write
from fedvit.secure.attempt import Attempt
from fedvit.tensors import Tensors
from fedvit.wire.messages import SumId, TaskKind

PAYLOAD, ATTEMPT = "payload", "ATTEMPT"


class SumStore:
    """The results of one device that wait for a sum. Raises StorageFailed, BadPayload for an impossible run."""

    def __init__(self, vault: Vault) -> None:
        self.lock = threading.Lock()  # held by an answer: results are stored by the thread that works
        self._vault = vault

    def keep_payload(self, run: str, number: int, kind: TaskKind, payload: Tensors) -> None:
        """Store the result of a round, and remove that of earlier rounds.

        A payload that a mask has covered stays as it is: one mask never covers two.
        """
        folder = self._folder(run, number, kind)
        with self.lock:
            for old in self._vault.path(run).glob(f"sum-{kind}-*"):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)
            attempt = self.read_attempt(run, number, kind)
            if attempt is None or attempt.inbox is None:
                write_sums(folder, Sums(1, self._vault.round_files.write_tensors(folder, PAYLOAD, payload)))

    def read_payload(self, sum_id: SumId) -> Tensors | None:
        """Return a result; None if the device has none of this round."""
        return self._vault.round_files.read_tensors(self._folder(sum_id.run, sum_id.round, sum_id.kind), PAYLOAD)

    def keep_attempt(self, attempt: Attempt) -> None:
        """Store what the device must remember, before it answers."""
        file = self._file(attempt.invite.sum.run, attempt.invite.sum.round, attempt.invite.sum.kind)
        content, key = msgspec.msgpack.encode(attempt), self._vault.round_files.key
        atomic_write(file, key.seal(content, path_in_vault(file)) if key else add_digest(content), private=True)

    def read_attempt(self, run: str, number: int, kind: TaskKind) -> Attempt | None:
        """Return the newest attempt at the sum of a round; None before the first. Raises Damaged."""
        file, key = self._file(run, number, kind), self._vault.round_files.key
        if not file.exists():
            return None
        try:
            raw = read_file(file)
            content = key.open(raw, path_in_vault(file)) if key else check_digest(raw)
            return msgspec.msgpack.decode(content, type=Attempt)
        except (BadPayload, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Damaged("FV1704", f"{file} is damaged: {error}") from error

    def remove(self, run: str) -> None:
        """Remove all results of a run that ended."""
        with contextlib.suppress(BadPayload):
            for folder in self._vault.path(run).glob("sum-*"):
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, run: str, number: int, kind: TaskKind) -> Path:
        return self._vault.path(run) / f"sum-{kind}-{number}"

    def _file(self, run: str, number: int, kind: TaskKind) -> Path:
        return self._folder(run, number, kind) / ATTEMPT
