"""The program of `edge-client serve`: answers pictures until it is stopped."""

import contextlib
import logging
import threading
import time

from edge_client.sandbox.confine import confine_server
from edge_client.serving.home import open_home
from edge_client.serving.models import ModelServer
from edge_client.serving.pipeline import Pipeline
from edge_client.serving.request import ServeRequest
from edge_client.serving.results import ResultFile
from edge_client.serving.server import PredictServer
from edge_client.serving.sources import FolderSource, check_folder, open_sources
from fedvit.files import private_files
from fedvit.signals import stop_on_signals
from fedvit.systemd import Notifier

log = logging.getLogger(__name__)

TICK_S = 1.0
CLOCK_JUMP_S = 60.0


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
