"""The HTTP API of a folder of runs, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from coordinator.http_api.app import ROOT, ApiGuard, make_app
from coordinator.http_api.site import ApiSite
from coordinator.record.opening import open_to_watch
from coordinator.security.api_tokens import ApiTokens, UserRole
from coordinator.security.credentials import ApiCredentials
from coordinator.security.folder import Deployment
from coordinator.serving.backup import BackupFolder
from coordinator.views.dashboard.reader import RecordReader

PASSWORD = "a password of eight"


class Api:
    """Sends requests with a token."""

    def __init__(self, site: ApiSite) -> None:
        self.site = site
        self.app = make_app(site)
        self.client = TestClient(ApiGuard(self.app, site.credentials), raise_server_exceptions=False)
        self.tokens: dict[str, str] = {}

    def make_token(self, role: UserRole) -> str:
        """Make a token of this role, once."""
        if role not in self.tokens:
            self.tokens[role] = self.site.credentials.tokens.add(f"of-{role}", role)
        return self.tokens[role]

    def ask(self, method: str, path: str, role: UserRole | None = "admin", **more: Any) -> Any:
        """Return the answer to a request; `role` None: without a token."""
        headers = {"authorization": f"Bearer {self.make_token(role)}"} if role else {}
        return self.client.request(method, f"{ROOT}{path}", headers=headers | more.pop("headers", {}), **more)

    def get(self, path: str, role: UserRole = "admin", **query: Any) -> Any:
        """Return the JSON of an answer that succeeds."""
        answer = self.ask("GET", path, role, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def send(self, method: str, path: str, body: Any = None, role: UserRole = "admin") -> Any:
        """Return the JSON of an answer that succeeds."""
        answer = self.ask(method, path, role, json={} if body is None else body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serve_api(runs: Path, deployment: Deployment | None = None, backups: Path | None = None) -> Iterator[Api]:
    """Serve the API of a folder with a record."""
    with open_to_watch(runs) as store:
        credentials = ApiCredentials(ApiTokens(runs), PASSWORD)
        site = ApiSite(
            RecordReader(store, runs), runs, credentials, deployment, BackupFolder(backups) if backups else None
        )
        api = Api(site)
        with api.client:
            yield api
