"""The loop of the worker process: takes requests from a queue, and writes the answers."""

import logging
import os
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import msgspec

from coordinator.compute.engine import Engine
from coordinator.compute.messages import Check
from coordinator.compute.pipes import write_frame
from coordinator.compute.process import Answered, Begin, Incoming, Warned, WorkerProgress, encode_error
from coordinator.compute.start_check import check_start
from coordinator.record.record import open_record

log = logging.getLogger(__name__)


class Answerer:
    """Answers requests until the process ends."""

    def __init__(self, replies: IO[bytes], log_fields: dict[str, object]) -> None:
        self._replies = replies
        self._log_fields = log_fields
        self._engine: Engine | None = None

    def serve(self, waiting: "SimpleQueue[bytes]") -> None:
        while True:
            request = msgspec.msgpack.decode(waiting.get(), type=Incoming)
            if isinstance(request, Begin):
                self._begin(request)
                continue
            try:
                value = self._answer(request)
            except Exception as error:
                raised = encode_error(error, self._report_damage())
                if not raised.kind:
                    log.exception("request failed")
                write_frame(self._replies, raised)
            else:
                raw = msgspec.Raw(msgspec.msgpack.encode(value))
                write_frame(self._replies, Answered(value=raw, damaged=self._report_damage()))

    def _begin(self, begin: Begin) -> None:
        opened = os.open(begin.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(opened, number)
        os.close(opened)
        self._log_fields["run"] = begin.run
        folder = Path(begin.folder)
        self._engine = engine = Engine(
            run=begin.run,
            config=begin.config,
            store=open_record(folder.parent, check=False),  # the parent process checks it
            folder=folder,
            graph_cache=Path(begin.graph_cache) if begin.graph_cache else None,
        )
        engine.progress = lambda text: write_frame(self._replies, WorkerProgress(text))
        engine.warn = lambda text: write_frame(self._replies, Warned(text))

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Check):
            return check_start(request)
        assert self._engine is not None, "a run begins before anything else is asked"
        return self._engine.ask(request)

    def _report_damage(self) -> list[str]:
        return self._engine.damaged() if self._engine else []
