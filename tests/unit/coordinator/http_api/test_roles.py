"""Every role against every endpoint: the table says who may do what, and nothing else is allowed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.record.record import open_record
from coordinator.security.api_tokens import ROLES, ApiTokens, UserRole
from coordinator.security.credentials import ApiCredentials
from tests.support.http_api import Api, serve_api
from tests.support.records import RUN, begin_run

LEAST: dict[str, UserRole] = {
    "DELETE /runs": "admin",
    "DELETE /runs/{run}": "admin",
    "DELETE /tokens/{name}": "admin",
    "GET /audit": "admin",
    "GET /audit/verdict": "admin",
    "GET /backups": "admin",
    "GET /devices": "viewer",
    "GET /devices/{device}/labels": "viewer",
    "GET /devices/{device}/logs": "viewer",
    "GET /events": "viewer",
    "GET /me": "viewer",
    "GET /models": "viewer",
    "GET /models/{model}": "viewer",
    "GET /openapi.json": "viewer",
    "GET /runs": "viewer",
    "GET /runs/{run}": "viewer",
    "GET /runs/{run}/activity": "viewer",
    "GET /runs/{run}/bundle": "operator",
    "GET /runs/{run}/details": "viewer",
    "GET /runs/{run}/devices": "viewer",
    "GET /runs/{run}/events": "viewer",
    "GET /runs/{run}/report": "viewer",
    "GET /runs/{run}/rounds": "viewer",
    "GET /runs/{run}/standings": "viewer",
    "GET /service": "viewer",
    "GET /sizes": "viewer",
    "GET /tokens": "admin",
    "PATCH /devices/{device}/labels": "operator",
    "POST /backups": "admin",
    "POST /devices/{device}/enroll": "admin",
    "POST /devices/{device}/revoke": "admin",
    "POST /gc": "admin",
    "POST /models/{model}/promote": "operator",
    "POST /models/{model}/retire": "operator",
    "POST /models/{model}/rollback": "operator",
    "POST /runs": "operator",
    "POST /runs/{run}/cancel": "operator",
    "POST /runs/{run}/pause": "operator",
    "POST /runs/{run}/release": "operator",
    "POST /runs/{run}/retry": "operator",
    "POST /runs/{run}/unpause": "operator",
    "POST /tokens": "admin",
}
"""The lowest role of each endpoint, written by hand: a change of a role has to be meant."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("roles") / "runs"
    begin_run(folder).close()
    with serve_api(folder) as made:
        yield made


def list_endpoints(api: Api) -> dict[str, dict[str, Any]]:
    """Every endpoint of the OpenAPI document by method and path."""
    paths = api.get("/openapi.json")["paths"]
    return {f"{method.upper()} {path}": entry for path, methods in paths.items() for method, entry in methods.items()}


def test_every_endpoint_has_the_role_of_the_table(api: Api) -> None:
    assert {name: entry["x-role"] for name, entry in list_endpoints(api).items()} == LEAST


def test_there_is_no_endpoint_beside_the_document(api: Api) -> None:
    served = {f"{method} {route.path}" for route in api.app.routes for method in getattr(route, "methods", ())}
    assert served - {name.replace("GET ", "HEAD ") for name in served} <= LEAST.keys()


@pytest.mark.parametrize("role", [None, *ROLES])
@pytest.mark.parametrize("endpoint", LEAST)
def test_a_role_below_that_of_an_endpoint_is_refused(api: Api, endpoint: str, role: UserRole | None) -> None:
    """An allowed request names things that do not exist, so that nothing changes."""
    method, path = endpoint.split()
    path = path.replace("{run}", "none").replace("{device}", "no device").replace("{name}", "none")
    may = role is not None and ROLES.index(role) >= ROLES.index(LEAST[endpoint])
    if may and path in ("/events", "/backups", "/gc"):
        return  # an endless answer, and changes that need no name
    before = [(record.id, record.status, record.paused_at) for record in api.site.reader.store.runs.read_all()]
    answer = api.ask(method, path, role, content=b"[]" if method != "GET" else b"")
    after = [(record.id, record.status, record.paused_at) for record in api.site.reader.store.runs.read_all()]
    if role is None:
        assert (answer.status_code, answer.json()["code"]) == (401, "FV1811")
    elif may:
        assert answer.status_code not in (401, 403, 500), answer.text
    else:
        assert (answer.status_code, answer.json()["code"]) == (403, "FV1812")
    assert before == after


def test_tokens_are_refused_once_they_are_removed_or_have_expired(tmp_path: Path) -> None:
    open_record(tmp_path / "runs").close()
    with serve_api(tmp_path / "runs") as api:
        tokens = api.site.credentials.tokens
        text = tokens.add("ci", "viewer")
        headers = {"authorization": f"Bearer {text}"}
        assert api.client.get("/api/v1/me", headers=headers).json()["role"] == "viewer"
        tokens.remove("ci")
        assert api.client.get("/api/v1/me", headers=headers).status_code == 401
        old = tokens.add("old", "admin", valid_days=1e-9)
        assert api.client.get("/api/v1/me", headers={"authorization": f"Bearer {old}"}).status_code == 401
        assert api.client.get("/api/v1/me", headers={"authorization": f"Basic {old}"}).status_code == 401
        assert api.client.get(f"/api/v1/me?token={text}").status_code == 401
        assert text not in (tmp_path / "runs" / "api-tokens.json").read_text()
        assert (tmp_path / "runs" / "api-tokens.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["ci", "dashboard"])
def test_sessions_end_with_their_token_also_if_another_gets_its_name(name: str, tmp_path: Path) -> None:
    credentials = ApiCredentials(ApiTokens(tmp_path), "a password of eight")
    user, person = (
        credentials.find(secret, "form") for secret in (credentials.tokens.add(name, "admin"), "a password of eight")
    )
    assert user
    assert person
    assert credentials.are_valid(user)
    credentials.tokens.remove(name)
    credentials.tokens.add(name, "admin")
    assert not credentials.are_valid(user)
    assert credentials.are_valid(person)


def test_password_of_the_dashboard_is_no_token(api: Api) -> None:
    answer = api.client.get("/api/v1/me", headers={"authorization": "Bearer a password of eight"})
    assert answer.status_code == 401


def test_only_an_admin_may_name_places_of_the_server_or_remove_runs(api: Api) -> None:
    places: list[dict[str, Any]] = [
        {"alerts": {"webhook": "http://127.0.0.1/"}},
        {"blobs": {"url": "file:///tmp/x", "mirror": True}},
        {"method": "feddf", "server_data": "/no/such/folder"},
        {"keep_runs": 0},
    ]
    for config in places:
        refused = api.ask("POST", "/runs", "operator", json={"config": config})
        assert (refused.status_code, refused.json()["code"]) == (403, "FV1812")
    made = api.send("POST", "/runs", {"config": {"alerts": {"webhook": "http://127.0.0.1/"}}, "name": "hooked"})
    assert made["status"] == "queued"


def test_record_is_unharmed(api: Api) -> None:
    assert api.get(f"/runs/{RUN}")["status"] == "running"
