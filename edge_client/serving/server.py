"""`POST /predict` and `GET /health`: pictures in, answers out, on this machine alone or with a token."""

import hmac
import io
import re
import threading
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Struct

from edge_client.serving.models import Classification, ModelServer, NoModel
from fedvit.data.images import read_image
from fedvit.errors import ConfigError, DataError, FedvitError, describe_fault
from fedvit.small_server import ListenAddress, SmallHandler, SmallServer

JSON = "application/json"
MAX_PICTURE_BYTES = 8 << 20
SMALL_PICTURE_BYTES = 256 << 10
LARGE_AT_ONCE = 2
"""Pictures above SMALL_PICTURE_BYTES that are in memory together."""
DECODED_BYTES = 64 << 20
"""Memory that one picture may take while it is decoded."""
MOST_TOP = 1000
MOST_FIELDS = 5
"""Fields of an address's query."""
_HEAD_BYTES = 32768


class RankedClass(Struct, frozen=True):
    """A class and its calibrated probability."""

    label: str
    confidence: float


class PredictionAnswer(Struct, frozen=True):
    """The answer to a picture."""

    model: str
    label: str | None  # None: unsure, it may be of no class
    confidence: float
    answers: list[RankedClass]
    seconds: float


class PredictError(Struct, frozen=True):
    """The reason why there is no prediction."""

    error: str
    code: str


def describe_answers(prediction: Classification) -> tuple[str | None, list[RankedClass]]:
    """Return the label, None for an unsure answer, and the likeliest classes."""
    answers = [RankedClass(each.label, round(each.probability, 5)) for each in prediction.answers]
    return None if prediction.is_unsure else prediction.label, answers


def describe_prediction(prediction: Classification) -> PredictionAnswer:
    """Return the answer for programs."""
    label, answers = describe_answers(prediction)
    return PredictionAnswer(
        prediction.model, label, round(prediction.confidence, 5), answers, round(prediction.seconds, 5)
    )


def read_picture(content: bytes, name: str, size: int) -> Any:
    """Decode a picture from memory. Raises DataError."""
    return read_image(Path(name), size, io.BytesIO(content), decoded_bytes=DECODED_BYTES)


class PredictServer(SmallServer):
    """Serves predictions. Raises ConfigError if it cannot listen."""

    at_once: ClassVar[int] = 8
    at_once_of_one_address: ClassVar[int] = 8
    request_queue_size = 16

    def __init__(self, listen: ListenAddress, server: ModelServer, token: str | None) -> None:
        self.server = server
        self.token = token
        self.began_at = time.monotonic()
        self.large = threading.BoundedSemaphore(LARGE_AT_ONCE)
        try:
            super().__init__(listen, _Handler)
        except OSError as error:
            where = f"unix:{listen.socket_path}" if listen.socket_path else f"{listen.host}:{listen.port}"
            raise ConfigError("FV1493", f"--listen {where} cannot be opened: {error.strerror or error}") from None


class _Handler(SmallHandler):
    server: PredictServer
    longest_request: ClassVar[int] = MAX_PICTURE_BYTES + _HEAD_BYTES
    protocol_version = "HTTP/1.1"  # its clients may ask whether a picture is wanted before they send it

    def parse_request(self) -> bool:
        """Refuse an address that cannot be read, too."""
        if not super().parse_request():
            return False
        try:
            parse_qsl(urlsplit(self.path).query, max_num_fields=MOST_FIELDS)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return False
        return True

    def handle_expect_100(self) -> bool:
        """Wait with the invitation until the head has been checked."""
        return True

    def do_GET(self) -> None:
        """Answer /health."""
        if not self._may_enter():
            return
        if urlsplit(self.path).path != "/health":
            self._refuse(HTTPStatus.NOT_FOUND, "there is only POST /predict and GET /health")
            return
        serving, model = self.server.server.status, self.server.server.current
        body = {
            "model": model.name if model else None,
            "state": model.entry.state if model else None,
            "answered": serving.answered.pictures,
            "mean_confidence": serving.answered.mean_confidence,
            "drift": serving.drift,
            "trouble": serving.trouble,
            "up_s": round(time.monotonic() - self.server.began_at, 1),
        }
        self._answer(HTTPStatus.OK if model else HTTPStatus.SERVICE_UNAVAILABLE, body)

    def do_POST(self) -> None:
        """Answer /predict."""
        if not self._may_enter():
            return
        address = urlsplit(self.path)
        if address.path != "/predict":
            self._refuse(HTTPStatus.NOT_FOUND, "there is only POST /predict and GET /health")
            return
        text = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,9}", text):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request needs its Content-Length")
        elif not 0 < (length := int(text)) <= MAX_PICTURE_BYTES:
            limit = f"a picture has 1 to {MAX_PICTURE_BYTES} bytes"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{limit}, this one {length}")
        elif length <= SMALL_PICTURE_BYTES:
            self._predict(length, address.query)
        elif self.server.large.acquire(timeout=self.timeout):
            try:
                self._predict(length, address.query)
            finally:
                self.server.large.release()
        else:
            self._refuse(HTTPStatus.TOO_MANY_REQUESTS, "other large pictures are on their way")

    def _predict(self, length: int, query: str) -> None:
        top = dict(parse_qsl(query)).get("top", "1")
        if not re.fullmatch(r"[0-9]{1,4}", top) or not 1 <= int(top) <= MOST_TOP:
            self._refuse(HTTPStatus.BAD_REQUEST, f"top={top[:20]!r} must be a number from 1 to {MOST_TOP}")
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            super().handle_expect_100()
        content = self.rfile.read(length)
        if len(content) < length:
            return
        try:
            prediction = self.server.server.answer(lambda size: read_picture(content, "of the request", size), int(top))
        except DataError as error:
            self._answer(HTTPStatus.UNPROCESSABLE_ENTITY, PredictError(str(error), error.code))
        except NoModel as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, PredictError(str(error), error.code))
        except Exception as error:  # noqa: BLE001 - no request ends without a reason
            self.server.server.note_trouble("a picture was not answered", describe_fault(error))
            code = error.code if isinstance(error, FedvitError) else "FV1492"
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, PredictError(describe_fault(error), code))
        else:
            self._answer(HTTPStatus.OK, describe_prediction(prediction))

    def _may_enter(self) -> bool:
        """Refuse a request without the token, and one that a page in a browser sent."""
        token = self.server.token
        if token is not None:
            sent = self.headers.get("Authorization", "")
            if hmac.compare_digest(sent.encode("utf-8", "replace"), f"Bearer {token}".encode()):
                return True
            self._refuse(HTTPStatus.UNAUTHORIZED, "the request needs the header Authorization: Bearer TOKEN")
            return False
        if self.headers.get("Origin"):
            self._refuse(HTTPStatus.FORBIDDEN, "pages of browsers are not served")
            return False
        return True

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._answer(status, PredictError(reason, "FV1493"))

    def _answer(self, status: HTTPStatus, body: object) -> None:
        headers = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("Connection", "close")]
        self.answer(status, JSON, msgspec.json.encode(body) + b"\n", headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request."""
        self._refuse(HTTPStatus(code), "this request cannot be read")
