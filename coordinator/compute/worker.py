"""The worker process: answers requests on its standard input until that ends."""

import gc
import logging
import os
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import msgspec

from coordinator.compute.messages import Check
from coordinator.compute.pipes import open_pipes, write_frame
from coordinator.compute.process import Answered, Begin, Incoming, Warned, WorkerProgress, encode_error
from fedvit.files import private_files

log = logging.getLogger(__name__)


def main() -> None:
    """Entry point; the process ends at once when its standard input ends."""
    log_fields = dict[str, object]()
    waiting, replies = open_pipes(log_fields)
    with private_files():
        _Serving(replies, log_fields).serve(waiting)


class _Serving:
    def __init__(self, replies: IO[bytes], log_fields: dict[str, object]) -> None:
        self._replies = replies
        self._log_fields = log_fields
        self._engine: Any = None

    def serve(self, waiting: "SimpleQueue[bytes]") -> None:
        gc.disable()  # half a million objects stay for good: to look through them again and again takes 0.3 s of 2.2
        import coordinator.compute.engine  # noqa: F401 - torch takes seconds; the end of the input is noticed already

        gc.freeze()
        gc.enable()
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
        from coordinator.compute.engine import Engine
        from coordinator.record.record import open_record

        opened = os.open(begin.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(opened, number)
        os.close(opened)
        self._log_fields["run"] = begin.run
        folder = Path(begin.folder)
        self._engine = Engine(
            run=begin.run,
            config=begin.config,
            store=open_record(folder.parent, check=False),  # the parent process checks it
            folder=folder,
            graph_cache=Path(begin.graph_cache) if begin.graph_cache else None,
        )
        self._engine.progress = lambda text: write_frame(self._replies, WorkerProgress(text))
        self._engine.warn = lambda text: write_frame(self._replies, Warned(text))

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Check):
            from coordinator.compute.start_check import check_start

            return check_start(request)
        return self._engine.ask(request)

    def _report_damage(self) -> list[str]:
        return self._engine.damaged() if self._engine else []


if __name__ == "__main__":
    main()
