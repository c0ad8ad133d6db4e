"""Every check against the real thing: boards' file trees, folders, engines that die, and a mosquitto of each kind."""

import os
import shutil
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_client.health.broker_checks import check_broker, check_coordinator
from edge_client.health.doctor import CHECKS, lines, run_checks, worst
from edge_client.health.doctor_context import DAY_S, DoctorContext, Finding
from edge_client.health.machine_checks import (
    check_battery,
    check_clock,
    check_disk,
    check_engine,
    check_heat,
    check_kernels,
    check_memory,
)
from edge_client.health.state_checks import check_data, check_files, check_state
from edge_client.health.status import Doing, Status, Unusable
from edge_client.settings import OwnerPolicy
from edge_client.storage.vault import Vault
from fedvit.blobs import BlobStore
from fedvit.data.images import DAMAGED
from fedvit.resources import Budget, ResourceUse
from fedvit.transport.address import Address
from fedvit.transport.base import Connected, Received
from fedvit.transport.mqtt import MqttTransport
from fedvit.wire.messages import CoordinatorState, Result, encode
from fedvit.wire.topics import Topics
from fedvit.wire.transfer import CHUNK_MESSAGE_BYTES
from fleet.partition import deal
from profiles.probes.broker import BrokerProbe
from tests.support.boards import pi_4, pi_5, write_tree
from tests.support.brokers import mosquitto, served
from tests.support.damage import flip
from tests.support.kernels import compiled, kernels_in

NOBODY = Address.parse("127.0.0.1:1")


@pytest.fixture
def context(tmp_path: Path) -> DoctorContext:
    """A Pi 4 without images and without a broker."""
    return DoctorContext(
        address=NOBODY,
        topics=Topics("home"),
        device="pi",
        state=tmp_path / "state",
        data=None,
        test_share=0.2,
        root=pi_4(tmp_path / "root"),
    )


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]


# --- files --------------------------------------------------------------------------------------------


def test_damaged_files_are_named(context: DoctorContext) -> None:
    [nothing] = check_files(context)
    assert (nothing.level, nothing.what) == ("ok", "not checked: there is no state yet")
    assert context.state is not None
    digest = BlobStore(context.state / "blobs").put(b"weights").digest
    Vault(context.state / "vault").commit(Result("run", 1, "train", 5, {}, ResourceUse()), {"w": np.ones(4)})
    [fine] = check_files(context)
    assert (fine.level, fine.what) == ("ok", "all 3 files are undamaged")
    file = BlobStore(context.state / "blobs").path(digest)
    [local] = context.state.rglob("local.safetensors")
    flip(file)
    flip(local, 0.99)
    [found] = check_files(context)
    assert found.level == "warning"
    assert found.what.startswith("2 of 3 files are damaged: ")
    assert str(file) in found.what
    assert str(local) in found.what
    assert file.exists(), "who looks changes nothing"


# --- engine -------------------------------------------------------------------------------------------


def dying(tmp_path: Path, script: str) -> str:
    """An interpreter that does this whatever it is asked."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_engine_of_this_machine_runs(context: DoctorContext) -> None:
    [found] = check_engine(context)
    assert found.level == "ok"
    assert found.what.startswith("onnxruntime 1.")
    assert found.what.endswith(" runs")
    assert found.hint is None


def test_an_engine_that_dies_of_an_illegal_instruction(context: DoctorContext, tmp_path: Path) -> None:
    [found] = check_engine(replace(context, interpreter=dying(tmp_path, "kill -ILL $$")))
    assert found.level == "error"
    assert "illegal instruction" in found.what
    assert found.hint is not None
    for words in ("ARMv8.0", "Raspberry Pi 3, 4, Zero 2 W", "onnxruntime>=1.25,<=1.31.1", "1.21.0"):
        assert words in found.hint


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -SEGV $$", "ended by SIGSEGV"),
        ("echo 'ImportError: GLIBC_2.28 not found' >&2; exit 1", "ImportError: GLIBC_2.28 not found"),
    ],
)
def test_an_engine_that_fails_otherwise(context: DoctorContext, tmp_path: Path, script: str, words: str) -> None:
    [found] = check_engine(replace(context, interpreter=dying(tmp_path, script)))
    assert found.level == "error"
    assert words in found.what


def test_kernels_that_are_not_installed(context: DoctorContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedvit.kernels.find_library", lambda: None)
    [found] = check_kernels(context)
    assert found.level == "ok"
    assert found.what == "fedvit[kernels] is not installed: steps take longer, and are the same otherwise"


def use_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where this package is installed, in processes that it starts, too."""
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{Path(__file__).parents[4]}")
    monkeypatch.setattr("fedvit.kernels.find_library", lambda: kernels_in(folder))


def test_kernels_that_load(context: DoctorContext, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(compiled(shared), monkeypatch)
    [found] = check_kernels(context)
    assert found.level == "ok"
    assert found.what == "fedvit[kernels] loads"


def test_kernels_that_do_not_load(
    context: DoctorContext, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(compiled(shared), tmp_path / "kernels"))
    kernels_in(folder).write_text("of another processor")
    use_kernels(folder, monkeypatch)
    [found] = check_kernels(context)
    assert found.level == "warning"
    assert "fedvit[kernels] cannot be loaded, training goes on without it" in found.what
    assert found.hint is not None
    assert "pip wheel ./kernels" in found.hint


# --- the machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available_kb", "budget_bytes", "level"),
    [
        (3_412_200, None, "ok"),
        (3_412_200, 512_000_000, "ok"),
        (400_000, 512_000_000, "warning"),  # less is free now than may be taken
        (3_412_200, 8_000_000_000, "error"),  # of 3.98 GB
        (200_000, None, "warning"),
        (90_000, None, "error"),
    ],
)
def test_memory(context: DoctorContext, available_kb: int, budget_bytes: int | None, level: str) -> None:
    text = f"MemTotal: 3884396 kB\nMemAvailable: {available_kb} kB\n"
    write_tree(context.root, {"proc/meminfo": text})
    [found] = check_memory(replace(context, policy=OwnerPolicy(budget=Budget(memory_bytes=budget_bytes))))
    assert found.level == level
    assert "of 3.98 GB are available" in found.what
    assert (found.hint is None) == (level == "ok")


def test_memory_that_is_not_known(context: DoctorContext, tmp_path: Path) -> None:
    [found] = check_memory(replace(context, root=tmp_path / "nothing"))
    assert (found.level, found.what) == ("ok", "not measured")


def test_disk(context: DoctorContext) -> None:
    assert context.state is not None
    context.state.mkdir()
    (context.state / "blob").write_bytes(bytes(12_000))
    [found] = check_disk(context)
    assert f"({context.state}), which takes 12 kB" in found.what
    free = shutil.disk_usage(context.root).free
    assert found.level == ("ok" if free >= 10**9 else "warning" if free >= 10**8 else "error")
    [unknown] = check_disk(replace(context, state=None))
    assert (unknown.level, unknown.what) == ("ok", "not measured")


def test_the_clock(context: DoctorContext) -> None:
    """A board without a battery wakes in 1970: a warning, and an error where certificates are to be checked."""
    secure = replace(context, address=Address("h", 8883, tls=True))
    assert levels([*check_clock(context)]) == [("clock", "ok")]
    for now_s in (0.0, time.time() + 40 * 365 * 86400):
        assert levels([*check_clock(replace(context, now_s=now_s))]) == [("clock", "warning")]
        [found] = check_clock(replace(secure, now_s=now_s))
        assert found.level == "error"
        assert "timedatectl" in str(found.hint)
        assert "certificates" in str(found.hint)
    assert "1970-01-01 00:00 UTC" in next(check_clock(replace(context, now_s=0.0))).what


def test_a_cool_board(context: DoctorContext) -> None:
    temperature, throttling = check_heat(context)
    assert (temperature.level, temperature.what) == ("ok", "55.0 C")
    assert (throttling.level, throttling.what) == ("ok", "the processor is not slowed down")


@pytest.mark.parametrize(
    ("millidegrees", "limit_c", "level"),
    [(79_900, None, "ok"), (80_000, None, "warning"), (70_000, 65.0, "error"), (60_000, 65.0, "ok")],
)
def test_temperature(context: DoctorContext, millidegrees: int, limit_c: float | None, level: str) -> None:
    write_tree(context.root, {"sys/class/thermal/thermal_zone0/temp": f"{millidegrees}\n"})
    found, _ = check_heat(replace(context, policy=OwnerPolicy(temperature_limit_c=limit_c)))
    assert found.level == level
    assert (found.hint is None) == (level == "ok")


@pytest.mark.parametrize(
    ("word", "what", "hint"),
    [
        ("0x50005", "the processor is slowed down, now: throttled, under-voltage", "power supply"),
        ("0x50000", "the processor is slowed down, since the device was started: throttled, under-voltage", "power"),
        ("0xe0008", "the processor is slowed down, now: soft temperature limit", "fan"),
    ],
)
def test_throttling(context: DoctorContext, tmp_path: Path, word: str, what: str, hint: str) -> None:
    _, found = check_heat(replace(context, root=pi_5(tmp_path / "pi5", throttled=word)))
    assert (found.level, found.what) == ("warning", what)
    assert hint in str(found.hint)


def test_a_limit_without_a_sensor(context: DoctorContext, tmp_path: Path) -> None:
    blind = replace(context, root=tmp_path / "nothing")
    assert levels([*check_heat(blind)]) == [("temperature", "ok"), ("throttling", "ok")]
    assert next(check_heat(replace(blind, policy=OwnerPolicy(temperature_limit_c=80.0)))).level == "warning"


WARY = OwnerPolicy(start_limit_c=65.0, min_battery_percent=30)


def test_readiness_options_without_a_sensor(context: DoctorContext, tmp_path: Path) -> None:
    blind = replace(context, root=tmp_path / "nothing", policy=WARY)
    temperature = next(check_heat(blind))
    assert (temperature.level, temperature.what) == ("warning", "not measured")
    assert temperature.hint == "--max-temperature cannot work without a sensor"
    both = next(check_heat(replace(blind, policy=replace(WARY, temperature_limit_c=80.0))))
    assert both.hint == "--temperature-limit and --max-temperature cannot work without a sensor"
    [charge] = check_battery(blind)
    assert (charge.level, charge.what) == ("warning", "none was found")
    assert "--min-battery" in str(charge.hint)
    [charge] = check_battery(replace(blind, policy=OwnerPolicy()))
    assert charge.level == "ok"


def test_a_board_that_is_too_hot_to_begin(context: DoctorContext) -> None:
    """55 C; it would go on with what it has begun."""
    found, _ = check_heat(replace(context, policy=OwnerPolicy(start_limit_c=50.0)))
    assert (found.level, found.what) == ("warning", "55.0 C, tasks are declined above 50 C")
    found, _ = check_heat(replace(context, policy=OwnerPolicy(start_limit_c=60.0)))
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("status", "least", "level"),
    [("Discharging", 30, "warning"), ("Charging", 30, "ok"), ("Discharging", 20, "ok"), ("Discharging", None, "ok")],
)
def test_a_battery(context: DoctorContext, status: str, least: int | None, level: str) -> None:
    supply = "sys/class/power_supply/BAT0"
    write_tree(
        context.root, {f"{supply}/type": "Battery\n", f"{supply}/capacity": "21\n", f"{supply}/status": f"{status}\n"}
    )
    [found] = check_battery(replace(context, policy=OwnerPolicy(min_battery_percent=least)))
    assert found.level == level
    assert found.what.startswith("21 %, ")
    assert ("tasks are declined below 30 %" in found.what) == (level == "warning")


# --- folders ------------------------------------------------------------------------------------------


def test_a_state_that_can_be_written_is_left_as_it_was(context: DoctorContext, tmp_path: Path) -> None:
    assert levels([*check_state(context)]) == [("state", "ok")]
    assert not (tmp_path / "state").exists()
    (tmp_path / "state").mkdir()
    assert levels([*check_state(context)]) == [("state", "ok")]
    assert list((tmp_path / "state").iterdir()) == []


def test_a_state_that_cannot_be_written(context: DoctorContext, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [found] = check_state(replace(context, state=tmp_path / "file" / "state"))
    assert found.level == "error"
    assert str(tmp_path / "file") in found.what
    assert "--state" in str(found.hint)


def test_images(context: DoctorContext, digits: Path) -> None:
    [found] = check_data(replace(context, data=digits))
    assert (found.level, found.what) == ("ok", "20 training and 12 test images of 3 classes: 0, 1, 2")


def test_images_of_which_some_cannot_be_read(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits / "train", tmp_path / "data" / "train")
    (tmp_path / "data" / "train" / "0" / "note.png").write_text("no image")
    (tmp_path / "data" / "test").mkdir()
    found = [*check_data(replace(context, data=tmp_path / "data"))]
    assert levels(found) == [("data", "ok"), ("data", "warning"), ("data", "warning")]
    assert "note.png" in found[1].what
    assert "no test image" in found[2].what


def test_images_all_that_is_left_out_is_named(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    cow = data / "train" / "cow"
    cow.mkdir()
    strays = [data / "readme.txt", data / "train" / "0" / "IMG_1.HEIC", data / "train" / "1" / "day2" / "a.png"]
    for stray in strays:
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"x")
    damaged = [data / "train" / "0" / f"note{number}.png" for number in range(4)]
    for image in damaged:
        image.write_text("no image")
    _, unreadable, stray_files, empty = check_data(replace(context, data=data))
    assert all(str(image) in unreadable.what for image in damaged)
    assert stray_files.level == "warning"
    assert stray_files.what.startswith("not used: 3; ")
    for stray in (strays[0], strays[1], strays[2].parent):
        assert str(stray) in stray_files.what
    assert f"of an unknown type: .heic: {strays[1]}" in stray_files.what
    assert empty.what == "class folders without an image that can be read: cow; they do not count as classes"


def test_images_no_kind_of_unused_file_is_hidden_by_many_of_another(
    context: DoctorContext, digits: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    for number in range(20):
        (data / f"a{number:02}.txt").write_text("x")
    (data / "train" / "0" / "z.HEIC").write_text("x")
    _, stray_files = check_data(replace(context, data=data))
    assert "z.HEIC" in stray_files.what
    assert "a00.txt" in stray_files.what
    assert "and 15 more" in stray_files.what


def cut_off(path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_images_that_are_cut_off_are_found_and_named(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    broken = [cut_off(data / "train" / "0" / "half.jpg"), cut_off(data / "test" / "1" / "half.jpg")]
    whole, unreadable = check_data(replace(context, data=data))
    assert "on trial" not in whole.what
    assert (whole.level, unreadable.level) == ("ok", "warning")
    assert all(str(image) in unreadable.what for image in broken)
    assert DAMAGED in unreadable.what


def test_images_beyond_the_sample_are_decoded_with_deep(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    """A sample of one image is that of the beginning."""
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    cut_off(data / "train" / "1" / "zzz.jpg")
    [sampled] = check_data(replace(context, data=data, decoded_images=1))
    assert "; 1 of them were decoded on trial" in sampled.what
    _, unreadable = check_data(replace(context, data=data, decoded_images=None))
    assert "zzz.jpg" in unreadable.what


def test_folder_of_several_devices_is_recognised(context: DoctorContext, digits: Path, tmp_path: Path) -> None:
    deal(str(digits), "iid", 2, tmp_path / "images" / "parts")
    for data in (tmp_path / "images", tmp_path / "images" / "parts"):
        [found] = check_data(replace(context, data=data))
        assert found.level == "error"
        assert str(tmp_path / "images" / "parts" / "device-0") in found.what


def test_images_that_the_device_could_not_decode_are_named(
    context: DoctorContext, digits: Path, tmp_path: Path
) -> None:
    """Their headers are good: only the running device has found out, and left it in its status."""
    state = tmp_path / "state"
    state.mkdir()
    unusable = {"damaged or cut off": Unusable(2, ("0/a.png", "1/b.png")), "an empty file": Unusable(1, ("0/c.png",))}
    status = Status(
        device="pi", federation="home", broker="b", software="1", process=1, started_s=0.0, written_s=0.0,
        doing=Doing(state="stopped", classes={}, unusable=unusable),
        rss_bytes=1, peak_rss_bytes=None, memory_budget_bytes=None,
    )  # fmt: skip
    (state / "status.json").write_bytes(msgspec.json.encode(status))
    _, found = check_data(replace(context, data=digits, state=state, decoded_images=1))
    assert found.level == "warning"
    assert found.what == ("images that could not be decoded in the last run: 2, damaged or cut off: 0/a.png, 1/b.png")


def test_no_images(context: DoctorContext, tmp_path: Path) -> None:
    [found] = check_data(replace(context, data=tmp_path / "nowhere"))
    assert found.level == "error"
    assert "no such folder" in found.what
    [found] = check_data(context)
    assert found.level == "warning"


# --- the broker ---------------------------------------------------------------------------------------


def test_a_broker_that_takes_everything(context: DoctorContext, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        found = [*check_broker(replace(context, address=broker.address))]
        [alone] = check_coordinator(replace(context, address=broker.address))
    assert levels(found) == [("broker", "ok"), ("login", "ok"), ("messages", "ok")]
    assert (alone.check, alone.level) == ("coordinator", "warning")
    assert "no coordinator serves federation 'home'" in alone.what
    assert "--federation" in str(alone.hint)
    assert found[-1].what == f"messages of {CHUNK_MESSAGE_BYTES} bytes are accepted"


@pytest.mark.parametrize(
    ("server_is_ahead_s", "side"), [(3600.0, None), (65 * DAY_S, "behind"), (-2 * DAY_S, "ahead of")]
)
def test_the_clock_of_the_server_is_compared(
    context: DoctorContext, tmp_path: Path, server_is_ahead_s: float, side: str | None
) -> None:
    state = CoordinatorState(1, alive=True, owner="c0ffee", clock_s=context.now_s + server_is_ahead_s)
    topics, inbox = context.topics, SimpleQueue[object]()
    with mosquitto(tmp_path / "broker") as broker:
        coordinator = MqttTransport(inbox, broker.address, "coordinator")
        coordinator.subscribe(topics.device_state(context.device), 1)
        coordinator.open()
        assert inbox.get(timeout=30) == Connected()

        def answer() -> None:
            while isinstance(inbox.get(), Received):
                coordinator.publish(topics.to_device(context.device), encode(state))

        answering = threading.Thread(target=answer)
        answering.start()
        here, *difference = check_coordinator(replace(context, address=broker.address))
        inbox.put(None)
        answering.join()
        coordinator.close()
    assert (here.check, here.level) == ("coordinator", "ok")
    assert [(found.check, found.level) for found in difference] == ([("clock", "warning")] if side else [])
    assert all(f"days {side} the server's" in found.what for found in difference)


def test_broker_that_does_not_listen(context: DoctorContext) -> None:
    [found] = check_broker(context)
    assert (found.check, found.level) == ("broker", "error")
    assert found.what == "127.0.0.1:1: connection refused"
    assert "--broker.listen 0.0.0.0 and --broker.port 1" in str(found.hint)
    # a deployment listens on all addresses from the beginning, and says itself on which ports
    [joined] = check_broker(replace(context, address=replace(context.address, cert_file=Path("certificate.pem"))))
    assert "coordinator start --broker.deployment" in str(joined.hint)
    assert "--broker.listen" not in str(joined.hint)
    assert "--broker HOST:PORT" in str(joined.hint)


def test_broker_name_that_cannot_be_resolved(context: DoctorContext) -> None:
    [found] = check_broker(replace(context, address=Address.parse("nosuchhost.invalid")))
    assert (found.check, found.level) == ("broker", "error")
    assert "'nosuchhost.invalid'" in str(found.hint)


@pytest.mark.parametrize(("user", "password"), [("fedvit", "wrong"), (None, None)])
def test_a_wrong_password(context: DoctorContext, tmp_path: Path, user: str | None, password: str | None) -> None:
    with mosquitto(tmp_path / "broker", password="secret") as broker:
        wrong = replace(broker.address, user=user, password=password)
        found = [*check_broker(replace(context, address=wrong))]
        right = [*check_broker(replace(context, address=broker.address))]
    assert levels(found) == [("broker", "ok"), ("login", "error")]
    assert found[-1].what == "broker refused: not authorised"
    assert "mqtt://USER:PASSWORD@HOST" in str(found[-1].hint)
    assert "wrong" not in "".join(map(lines, found))
    assert worst(right) == "ok"


@pytest.mark.parametrize("setting", ["message_size_limit 20000", "max_packet_size 20000"])
def test_a_broker_that_takes_small_messages_only(
    context: DoctorContext, tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of mosquitto's limits drops what is larger without a word, the other ends the connection."""
    monkeypatch.setattr(BrokerProbe.seconds, "__defaults__", (0.5,))
    with mosquitto(tmp_path / "broker", setting) as broker:
        found = [*check_broker(replace(context, address=broker.address))]
    assert levels(found) == [("broker", "ok"), ("login", "ok"), ("messages", "error")]
    assert f"a message of {CHUNK_MESSAGE_BYTES} bytes" in found[-1].what
    assert "16384 bytes are" in found[-1].what
    assert "message_size_limit" in str(found[-1].hint)


def test_access_rules_that_take_no_message(
    context: DoctorContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokerProbe.seconds, "__defaults__", (0.5,))
    (tmp_path / "rules").write_text("user fedvit\ntopic read fl1/#\n")
    (tmp_path / "rules").chmod(0o600)
    with mosquitto(tmp_path / "broker", f"acl_file {tmp_path / 'rules'}", password="secret") as broker:
        found = [*check_broker(replace(context, address=broker.address))]
    assert levels(found) == [("broker", "ok"), ("login", "ok"), ("messages", "error")]
    assert "below fl1/home/d/pi/up/" in str(found[-1].hint)


def test_tls(context: DoctorContext, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker", tls=True) as broker:
        trusted = [*check_broker(replace(context, address=broker.address))]
        stranger = [*check_broker(replace(context, address=replace(broker.address, ca_file=None)))]
        no_file = replace(broker.address, ca_file=tmp_path / "no.pem")
        unreadable = [*check_broker(replace(context, address=no_file))]
        plain = [*check_broker(replace(context, address=replace(broker.address, tls=False, ca_file=None)))]
    assert levels(trusted) == [("broker", "ok"), ("tls", "ok"), ("login", "ok"), ("messages", "ok")]
    assert trusted[1].what.startswith("TLSv1.")
    assert levels(stranger) == [("broker", "ok"), ("tls", "error")]
    assert "the certificate is not trusted" in stranger[1].what
    assert "--ca-file" in str(stranger[1].hint)
    assert levels(unreadable) == [("broker", "ok"), ("tls", "error")]
    assert "no.pem" in unreadable[1].what
    assert levels(plain) == [("broker", "ok"), ("login", "error")]
    assert "mqtts://" in str(plain[1].hint)


def test_a_port_without_tls(context: DoctorContext, tmp_path: Path) -> None:
    with mosquitto(tmp_path / "broker") as broker:
        found = [*check_broker(replace(context, address=replace(broker.address, tls=True)))]
    assert levels(found) == [("broker", "ok"), ("tls", "error")]


def test_something_that_is_no_broker(context: DoctorContext) -> None:
    """It takes the connection and ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        steps = check_broker(replace(context, address=Address("127.0.0.1", port)))
        assert next(steps).level == "ok"
        server.accept()[0].close()
        server.close()
        [found] = steps
    assert (found.check, found.level) == ("login", "error")


def test_a_coordinator_is_found_by_its_federation(context: DoctorContext, tmp_path: Path) -> None:
    """A service, over a real broker; a run's coordinator answers alike."""
    with mosquitto(tmp_path / "broker") as broker, served(broker.address) as said:
        here = replace(context, address=broker.address)
        [found] = check_coordinator(here)
        [elsewhere] = check_coordinator(replace(here, topics=Topics("hmoe")))
    assert (found.level, found.hint) == ("ok", None)
    assert found.what.startswith("coordinator serve on ")
    assert elsewhere.level == "warning"
    assert "no coordinator serves federation 'hmoe'" in elsewhere.what
    assert said == [], "it did not join"


# --- together -----------------------------------------------------------------------------------------


def test_all_checks_are_made_one_after_the_other(context: DoctorContext, digits: Path) -> None:
    found = [*run_checks(replace(context, data=digits))]
    assert len(CHECKS) == 14
    assert [finding.check for finding in found] == [
        "engine", "kernels", "memory", "disk", "clock", "temperature", "throttling", "battery", "state", "files",
        "vault key", "identity", "data", "broker",
    ]  # fmt: skip
    assert worst(found) == "error"
    assert worst(found[:-1]) == "ok"
    assert worst([]) == "ok"
    assert all(finding.hint for finding in found if finding.level != "ok")


def test_findings_as_text() -> None:
    assert lines(Finding(check="disk", level="ok", what="plenty")) == "ok       disk         plenty"
    assert lines(Finding(check="disk", level="error", what="full", hint="delete")) == (
        "error    disk         full\n                      delete"
    )
