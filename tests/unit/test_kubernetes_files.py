"""deploy/kubernetes: valid for Kubernetes, whole, and with commands that the programs understand."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from coordinator.config.service import make_service_config
from coordinator.security.broker.process import claim_port
from tests.support.command_lines import parse
from tests.support.waiting import WAIT_S, wait_until

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((FOLDER / name).read_text())
]
VERSION = "1.33"


def find_values(value: Any, key: str) -> Iterator[Any]:
    """Find the values of a key at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from find_values(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from find_values(inner, key)


def find_object(kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in OBJECTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def find_container(workload: dict[str, Any]) -> dict[str, Any]:
    [container] = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifest_follows_the_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_each_file_is_listed_and_each_name_exists() -> None:
    """Secrets, configuration, volumes and services that a manifest names are made by another one."""
    written = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == written
    secrets = {each["name"] for each in KUSTOMIZATION["secretGenerator"]}
    configurations = {each["name"] for each in KUSTOMIZATION["configMapGenerator"]}
    keys = set(re.findall(r"^(\w+)=", (FOLDER / "secrets.env.example").read_text(), re.MULTILINE))
    for each in OBJECTS:
        references = [*find_values(each, "secretKeyRef"), *find_values(each, "secretRef")]
        assert {reference["name"] for reference in references} <= secrets
        assert {reference["key"] for reference in references if "key" in reference} <= keys
        assert set(find_values(each, "secretName")) <= secrets
        assert {reference["name"] for reference in find_values(each, "configMap")} <= configurations
        for pod in find_values(each, "template"):
            volumes = {volume["name"] for volume in pod["spec"]["volumes"]} if "volumes" in pod["spec"] else set()
            volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
            mounted = {mount["name"] for mounts in find_values(pod, "volumeMounts") for mount in mounts}
            assert mounted == volumes
    services = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == "Service"}
    container = find_container(find_object("StatefulSet", "coordinator"))
    addresses = " ".join([*find_settings_script(), *(variable["value"] for variable in container["env"])])
    assert set(re.findall(r"@([\w-]+):", addresses)) <= services


def find_settings_script() -> list[str]:
    """Return the command that writes the service's file."""
    [settings] = find_object("StatefulSet", "coordinator")["spec"]["template"]["spec"]["initContainers"]
    return list(settings["command"])


def test_command_of_the_coordinator_is_understood() -> None:
    args = find_container(find_object("StatefulSet", "coordinator"))["args"]
    parse(["coordinator", *args])
    assert not [word for word in args if "PASSWORD" in word], "other users of a machine can read command lines"


def test_settings_that_are_written_name_the_broker(tmp_path: Path) -> None:
    shell, option, script = find_settings_script()
    command = [shell, option, script.replace("/config/", f"{tmp_path}/")]
    subprocess.run(command, env={**os.environ, "BROKER_PASSWORD": "a-secret"}, check=True)
    file = tmp_path / "service.toml"
    _, broker = make_service_config(tomllib.loads(file.read_text()), str(file))
    assert broker.broker == "mqtt://fedvit:a-secret@mosquitto:1883"
    assert file.stat().st_mode & 0o077 == 0


def test_configuration_of_the_broker_is_accepted(tmp_path: Path) -> None:
    """mosquitto starts with it, asks for a password, and speaks TLS to devices."""
    encrypted, plain = claim_port(), claim_port()
    text = (FOLDER / "mosquitto.conf").read_text().replace("listener 8883", f"listener {encrypted} 127.0.0.1")
    text = text.replace("listener 1883", f"listener {plain} 127.0.0.1")
    for folder in ("tls", "users"):
        (tmp_path / folder).mkdir()
        text = text.replace(f" /{folder}/", f" {tmp_path / folder}/")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-subj", "/CN=localhost", "-keyout", tmp_path / "tls" / "tls.key", "-out", tmp_path / "tls" / "tls.crt"],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run(["mosquitto_passwd", "-b", "-c", tmp_path / "users" / "users", "fedvit", "secret"], check=True)
    file = tmp_path / "mosquitto.conf"
    # started by root it would become another user, who may not enter this folder
    file.write_text(f"{text}user {getpass.getuser()}\n")
    broker = shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin") or "mosquitto"
    process = subprocess.Popen([broker, "-c", file], stderr=subprocess.PIPE)
    try:

        def is_open(port: int) -> bool:
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        wait_until(lambda: is_open(encrypted) and is_open(plain), "mosquitto did not listen")
    finally:
        process.terminate()
        process.wait(WAIT_S)
