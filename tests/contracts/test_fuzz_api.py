"""Drawn requests to every endpoint of the OpenAPI document: none ends with an unexpected failure."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.security.folder import Deployment, Settings
from tests.support.http_api import Api, serve_api
from tests.support.records import RUN, begin_run

REQUESTS = 1500
WORDS = [
    RUN, "none", "~newest", "", "a", "0", "-1", "1e400", "../..", "%2e%2e", "x" * 300, "\x00", "\u202e", "\U0001f600",
    "site=berlin", "99999999999999999999", "nan", "true", "[]", "{}", "' or 1=1 --", "\\", "\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    begin_run(folder / "runs").close()
    deployment = Deployment.create(folder / "deployment", Settings(
        federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost",)))  # fmt: skip
    with serve_api(folder / "runs", deployment, folder / "backups") as made:
        yield made


def draw_value(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value that may fit nothing."""
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [draw_value(draw, depth + 1) for _ in range(draw.randrange(3))]
    if kind == 7:
        return {draw.choice(WORDS): draw_value(draw, depth + 1) for _ in range(draw.randrange(3))}
    return [None, True, draw.randrange(-(2**70), 2**70), draw.uniform(-1e9, 1e9), *draw.sample(WORDS, 2)][kind]


def draw_body(draw: random.Random, document: dict[str, Any], entry: dict[str, Any]) -> bytes:
    """A body with known keys and drawn values, or any."""
    schema = entry.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    known = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {}).get("properties", {})
    if known and draw.random() < 0.8:
        names = draw.sample(sorted(known), draw.randrange(len(known) + 1))
        value: Any = {name: draw_value(draw) for name in names}
    else:
        value = draw_value(draw)
    return json.dumps(value).encode("utf-8", "replace")


def test_drawn_requests_are_answered_without_a_failure(api: Api) -> None:
    document, draw = api.get("/openapi.json"), random.Random(34)
    endpoints = [
        (method.upper(), path, entry)
        for path, methods in document["paths"].items()
        for method, entry in methods.items()
        if not path.endswith(("/events", "/report", "/bundle", "/revoke"))  # endless, or with processes and waits
    ]
    codes: set[int] = set()
    for _ in range(REQUESTS):
        method, path, entry = draw.choice(endpoints)
        for name in ("run", "device", "name"):
            word = draw.choice(WORDS).replace("\x00", "%00").replace("\n", "%0A") or "x"
            path = path.replace(f"{{{name}}}", word.replace("/", "%2F"))
        names = [one["name"] for one in entry.get("parameters", ()) if one["in"] == "query"]
        query = [(name, draw.choice(WORDS)) for name in names for _ in range(draw.randrange(3))]
        body = draw_body(draw, document, entry) if method != "GET" else b""
        answer = api.ask(method, path, "admin", params=query, content=body)
        codes.add(answer.status_code)
        assert answer.status_code < 500, (method, path, query, body, answer.text)
        if answer.status_code != 200 and answer.headers.get("content-type", "").startswith("application/json"):
            assert set(answer.json()) == {"code", "message"}
    assert {200, 404, 422} <= codes
