"""From the pictures of sources to lines and to the home: one thread for each source."""

import threading
from collections.abc import Sequence

from edge_client.serving.home import PredictionEntry
from edge_client.serving.models import ModelServer, NoModel
from edge_client.serving.results import ResultFile, make_line
from edge_client.serving.sources import Picture, Source, follow
from fedvit.errors import DataError, describe_fault


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
