"""The sender's bookkeeping of one blob, for all its receivers together. Pure, as `fedvit.wire.transfer`."""

from statistics import median_low

import numpy as np

from fedvit.errors import BadPayload
from fedvit.wire.messages import BlobNack, Manifest
from fedvit.wire.transfer import ACK_EVERY_CHUNKS, WINDOW_CHUNKS


class Outgoing:
    """A sender's half: one blob, any number of receivers on one topic.

    The cost of a BlobNack does not depend on the number of receivers: the sums over all receivers are updated
    incrementally.
    """

    def __init__(self, manifest: Manifest, window: int = WINDOW_CHUNKS) -> None:
        self.manifest = manifest
        self.sent_chunks = 0  # repairs included
        self._window = window
        self._sent_seq = np.zeros(manifest.chunks, np.int64)
        self._seq = 0
        # of each receiver, in its row:
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._to_send = np.zeros((0, manifest.chunks), np.bool_)  # missing and not under way
        self._under_way = np.zeros(0, np.int64)
        self._floor_seq = np.zeros(0, np.int64)  # chunks sent up to here either arrived or are lost
        # of all together:
        self._demand = np.zeros(manifest.chunks, np.int64)  # how many receivers each chunk is to be sent to
        self._demanded = 0  # the sum of these numbers
        self._with_under_way = np.zeros(manifest.chunks + 1, np.int64)  # how many have so many chunks under way
        self._most_under_way = 0

    @property
    def receiver_count(self) -> int:
        return len(self._rows)

    @property
    def has_work(self) -> bool:
        return self._demanded > 0

    @property
    def under_way(self) -> int:
        """Chunks ahead of the slowest receiver."""
        return self._most_under_way

    def update(self, receiver: str, nack: BlobNack) -> None:
        """A receiver's BlobNack arrived. Raises BadPayload when it asks for chunks that do not exist."""
        missing, end = np.zeros(self.manifest.chunks, np.bool_), 0
        for first, count in nack.missing:
            if first < end or count < 1 or first + count > self.manifest.chunks:  # ascending: none is counted twice
                raise BadPayload(
                    "FV2302",
                    f"{receiver} wants chunks {first} to {first + count - 1} of a blob of {self.manifest.chunks} chunks"
                    + (f", after those up to {end - 1}" if end else ""),
                )
            missing[first : first + count] = True
            end = first + count
        row = self._row(receiver)
        heard_seq = self._seq if nack.stalled else min(nack.last_seq, self._seq)
        self._floor_seq[row] = floor_seq = max(int(self._floor_seq[row]), heard_seq)
        to_send = missing & (self._sent_seq <= floor_seq)
        self._set(row, to_send, int(np.count_nonzero(missing)) - int(np.count_nonzero(to_send)))

    def drop(self, receiver: str) -> None:
        """The receiver has all chunks, or is gone."""
        row = self._rows.pop(receiver, None)
        if row is not None:
            self._set(row, np.zeros(self.manifest.chunks, np.bool_), 0)
            self._with_under_way[0] -= 1
            self._free_rows.append(row)

    def list_slow_receivers(self) -> list[str]:
        """Receivers that alone keep the window full.

        All receivers share one pace, so a slow one shows by its backlog and not by its rate. Four times the backlog of
        the median is a quarter of its speed.
        """
        if len(self._rows) < 2:
            return []
        under_way = self._under_way.tolist()
        backlog = {name: max(0, under_way[row] - ACK_EVERY_CHUNKS) for name, row in self._rows.items()}
        limit = max(4 * median_low(backlog.values()), self._window // 2)
        return [name for name, chunks in backlog.items() if chunks > limit]

    def next_chunk(self) -> tuple[int, int] | None:
        """(index, send number) of the chunk to send now; None when the window is full or no receiver misses one."""
        if self._most_under_way >= self._window or not self.has_work:
            return None
        index = int((self._demand > 0).argmax())
        self._seq += 1
        self._sent_seq[index] = self._seq
        self.sent_chunks += 1
        sent_to = self._to_send[:, index]
        before = self._under_way[sent_to]
        self._under_way[sent_to] += 1
        updated = np.bincount(before)
        self._with_under_way[: len(updated)] -= updated
        self._with_under_way[1 : len(updated) + 1] += updated
        self._most_under_way = max(self._most_under_way, len(updated))
        sent_to[:] = False
        self._demanded -= int(self._demand[index])
        self._demand[index] = 0
        return index, self._seq

    def _row(self, receiver: str) -> int:
        """The row of a receiver, which is made where there is none."""
        if receiver not in self._rows:
            if not self._free_rows:
                self._grow()
            row = self._rows[receiver] = self._free_rows.pop()
            self._floor_seq[row] = self._seq
            self._with_under_way[0] += 1
        return self._rows[receiver]

    def _grow(self) -> None:
        """Make room for as many receivers again."""
        had = len(self._to_send)
        more = max(4, had)
        self._to_send = np.concatenate([self._to_send, np.zeros((more, self.manifest.chunks), np.bool_)])
        self._under_way = np.concatenate([self._under_way, np.zeros(more, np.int64)])
        self._floor_seq = np.concatenate([self._floor_seq, np.zeros(more, np.int64)])
        self._free_rows.extend(range(had, had + more))

    def _set(self, row: int, to_send: "np.ndarray[tuple[int], np.dtype[np.bool_]]", under_way: int) -> None:
        """Note what a receiver needs, and what follows from that for all together."""
        changed = np.flatnonzero(self._to_send[row] != to_send)
        if len(changed):
            change = np.where(to_send[changed], 1, -1)
            self._demand[changed] += change
            self._demanded += int(change.sum())
            self._to_send[row] = to_send
        self._with_under_way[self._under_way[row]] -= 1
        self._with_under_way[under_way] += 1
        self._under_way[row] = under_way
        self._most_under_way = max(self._most_under_way, under_way)
        while self._most_under_way and not self._with_under_way[self._most_under_way]:
            self._most_under_way -= 1
