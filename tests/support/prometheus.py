"""A real Prometheus with the project's alerts, and the pages of programs that it scrapes."""

import base64
import json
import re
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from coordinator.security.broker.process import claim_port
from tests.support.programs import Stage
from tests.support.waiting import WAIT_S

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "fedvit.rules.yml"
SCRAPE_S = 0.5
PASSWORD = "sixteen letters!"


def password_file(stage: Stage) -> Path:
    """Return a file with the password of all pages."""
    file = stage.folder / "prometheus.password"
    file.write_text(f"{PASSWORD}\n")
    return file


class Prometheus:
    """A Prometheus that scrapes these ports, by job; `at_once`: alerts do not wait until a fault has lasted."""

    def __init__(self, stage: Stage, jobs: dict[str, list[int]], *, at_once: bool = False) -> None:
        self._address = f"127.0.0.1:{claim_port('127.0.0.1', 0)}"
        rules = RULES
        if at_once:
            rules = stage.folder / "rules.yml"
            rules.write_text(re.sub(r"(?m)^        for: .*\n", "", RULES.read_text()))
        config = {
            "global": {"scrape_interval": f"{SCRAPE_S * 1000:.0f}ms", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": job,
                    "basic_auth": {"username": "fedvit", "password_file": str(password_file(stage))},
                    "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
                }
                for job, ports in jobs.items()
            ],
        }
        file = stage.folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # which is YAML
        storage = f"--storage.tsdb.path={stage.folder / 'prometheus'}"
        stage.start(
            "prometheus", ["prometheus", f"--config.file={file}", storage, f"--web.listen-address={self._address}"]
        )

    def values(self, query: str) -> list[float]:
        """Return what a query finds now; nothing while Prometheus starts."""
        found = self._ask(f"query?{urlencode({'query': query})}")
        return [float(entry["value"][1]) for entry in found["result"]] if found else []

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire now."""
        found = self._ask("alerts") or {"alerts": []}
        return {alert["labels"]["alertname"] for alert in found["alerts"] if alert["state"] == "firing"}

    def _ask(self, page: str) -> Any:
        try:
            with urlopen(f"http://{self._address}/api/v1/{page}", timeout=WAIT_S) as answer:
                return json.load(answer)["data"]
        except URLError:
            return None


def page(port: int, name: str) -> tuple[int, str]:
    """Return status and content of a page; status 0 while nobody serves it."""
    key = base64.b64encode(f"fedvit:{PASSWORD}".encode()).decode()
    asked = Request(f"http://127.0.0.1:{port}/{name}", headers={"Authorization": f"Basic {key}"})
    try:
        with urlopen(asked, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except URLError:
        return 0, ""


def condition(port: int) -> tuple[int, str, set[str]]:
    """Return the status of `/readyz`, the program's role, and the causes that it names."""
    status, content = page(port, "readyz")
    if not content:
        return status, "", set()
    answer = json.loads(content)
    assert answer["ready"] == (status == 200)
    return status, str(answer["role"]), {entry["cause"] for entry in answer["causes"]}
