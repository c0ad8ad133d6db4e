"""Drawn requests to every endpoint of the OpenAPI document: each is answered as the document says."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from coordinator.http_api.app import ROOT
from coordinator.security.folder import Deployment, Settings
from tests.support.http_api import serve_api
from tests.support.records import begin_run

SLOW = r"/(events|report|bundle|revoke)$"
"""Endless answers, and those with processes and waits."""
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection,
]  # fmt: skip


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[schemathesis.BaseSchema]:
    folder: Path = tmp_path_factory.mktemp("fuzz")
    begin_run(folder / "runs").close()
    deployment = Deployment.create(folder / "deployment", Settings(
        federation="f", listen="127.0.0.1", port=1, enrolment_port=2, hosts=("localhost",)))  # fmt: skip
    with serve_api(folder / "runs", deployment, folder / "backups") as api:
        header = {"authorization": f"Bearer {api.make_token('admin')}"}
        made = schemathesis.openapi.from_asgi(f"{ROOT}/openapi.json", api.client.app, headers=header)
        made.config.update(headers=header)
        yield made.exclude(path_regex=SLOW)


@pytest.mark.slow
def test_drawn_requests_are_answered_as_the_document_says(document: schemathesis.BaseSchema) -> None:
    """Valid and invalid ones, of every endpoint."""
    for found in document.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
            )
            def ask(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=CHECKS)

            with suppress(Unsatisfiable):  # a request without parameters cannot be wrong
                ask()
