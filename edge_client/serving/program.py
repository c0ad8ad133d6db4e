"""The program of `edge-client serve`: answers pictures until it is stopped."""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from edge_client.sandbox.confine import confine_server
from edge_client.serving.home import PredictionEntry, open_home
from edge_client.serving.models import ModelServer, NoModel
from edge_client.serving.request import ServeRequest
from edge_client.serving.results import ResultFile, make_line
from edge_client.serving.server import PredictServer
from edge_client.serving.sources import FolderSource, Picture, Source, check_folder, follow, open_sources
from fedvit.errors import DataError, describe_fault
from fedvit.files import private_files
from fedvit.signals import stop_on_signals
from fedvit.systemd import Notifier

log = logging.getLogger(__name__)

TICK_S = 1.0
CLOCK_JUMP_S = 60.0


class Pipeline:
    """Answers the pictures of sources, and passes the predictions on."""

    def __init__(self, server: ModelServer, results: ResultFile | None, home: PredictionEntry | None, top: int) -> None:
        self._server = server
        self._results = results
        self._home = home
        self._top = top
        self._lock = threading.Lock()  # of the results

    def start(self, sources: Sequence[Source], stop: threading.Event) -> None:
        """Follow each source in a thread until `stop`."""
        for source in sources:
            threading.Thread(target=self._follow, args=(source, stop), name=source.name, daemon=True).start()

    def _follow(self, source: Source, stop: threading.Event) -> None:
        follow(source, lambda picture: self._answer(source, picture), stop)

    def _answer(self, source: Source, picture: Picture) -> None:
        """Answer one picture; whatever is wrong with it, the next one follows."""
        prediction, error = None, ""
        try:
            prediction = self._server.answer(picture.read, self._top, source.name)
        except NoModel as reason:
            self._server.note_trouble("pictures are not answered", str(reason))
            return
        except DataError as reason:
            error = str(reason)
        except Exception as reason:  # noqa: BLE001 - a source's thread must not end
            error = describe_fault(reason)
            self._server.note_trouble("a picture was not answered", error)
        if self._home and prediction:
            self._home.show(prediction, source.name, has_drifted=bool(self._server.status.drift))
        if self._results:
            with self._lock, self._server.report_storage("a prediction was not written, answers go on"):
                self._results.write(make_line(source.name, picture.name, prediction, error))


def serve_pictures(request: ServeRequest) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises ConfigError for a source or an address that cannot be used."""
    opened = [FolderSource(check_folder(folder, "--watch")) for folder in request.folders]
    every_source = [*opened, *open_sources(request.sources, request.every_s)]
    if not confine_server():  # before threads start
        log.warning("a model that is an attack could start programs: this system has no seccomp")
    notifier, stop = Notifier.from_environment(), stop_on_signals()
    with private_files(), contextlib.ExitStack() as stack:
        server = ModelServer(request.state, request.settings.threads)
        web = PredictServer(request.address, server, request.token)
        stack.callback(web.server_close)
        server.start()
        stack.callback(server.close)
        entry = open_home(request.settings, request.state) if request.settings.home else None
        if entry:
            entry.start()
            stack.callback(entry.close)
        pipeline = Pipeline(server, ResultFile(request.results) if request.results else None, entry, request.top)
        threading.Thread(target=web.serve_forever, name="web", daemon=True).start()
        stack.callback(web.shutdown)
        pipeline.start(every_source, stop)
        current = server.current
        log.info("serving", extra={"address": web.address, "model": current.name if current else None})
        notifier.ready()
        _wait(stop, notifier, server)
        notifier.stopping()


def _wait(stop: threading.Event, notifier: Notifier, server: ModelServer) -> None:
    """Wait for the end, and log when the clock was set meanwhile: days of statistics may then be wrong."""
    offset_s = time.time() - time.monotonic()
    while not stop.wait(TICK_S):
        if server.is_alive():
            notifier.alive()
        now_s = time.time() - time.monotonic()
        if abs(now_s - offset_s) > CLOCK_JUMP_S:
            log.warning("the clock was set", extra={"by_s": round(now_s - offset_s)})
            offset_s = now_s
