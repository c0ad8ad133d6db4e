"""The client's documents have the names and types that the OpenAPI document promises."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.record.record import open_record
from fedvit.client import Changed, ChangedModel, Device, Labels, Page, Round, Run, Submitted, UsedModel
from tests.support.http_api import Api, serve_api

PAIRS = {
    Run: "RunProgress", Page: "RunPage", Round: "RoundView", Submitted: "SubmittedRun", Changed: "ChangedRun",
    Labels: "DeviceLabels", UsedModel: "ModelView", ChangedModel: "ModelChange",
}  # fmt: skip


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder: Path = tmp_path_factory.mktemp("client") / "runs"
    open_record(folder).close()
    with serve_api(folder) as made:
        yield made


@pytest.mark.parametrize(("kind", "name"), PAIRS.items())
def test_documents_of_the_client_are_parts_of_those_of_the_server(api: Api, kind: Any, name: str) -> None:
    properties = api.get("/openapi.json")["components"]["schemas"][name]["properties"]
    assert {field.name for field in msgspec.structs.fields(kind)} <= properties.keys()


def test_devices_have_the_fields_of_the_client() -> None:
    from coordinator.operations.devices import _describe
    from coordinator.security.registry import Certificate, JoinedDevice

    device = JoinedDevice("a", 0.0, [Certificate("1f", 0.0, 4e9)], misuses=0)
    shown = _describe(device, 0.0, None, "authority", ["authority"])
    assert msgspec.convert(shown, Device).device == "a"


def test_document_resolves_all_references(api: Api) -> None:
    document = api.get("/openapi.json")
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(inner)

    assert set(references(document)) <= known
