"""Versions of devices: recorded with the run, and required by it."""

from tests.support.runs import Stage


def test_run_refuses_devices_that_are_too_old(stage: Stage) -> None:
    """It says so at its start, and to the device."""
    old, new = stage.fake("old", software="0.1.0"), stage.fake("new", software="0.10.1")
    stage.start(devices=1, min_device_version="0.2")
    assert stage.finish() == "finished"
    assert "waiting for 1 device, each with fedvit 0.2 or newer" in stage.lines
    assert set(stage.refusals("old")) == {  # it may ask again
        "hello: its fedvit is version '0.1.0', and this run requires 0.2 or newer: update fedvit on the device"
    }
    assert (old.tasks(), new.tasks()) == ([], [1])
    assert {device.device: device.software for device in stage.store.devices.read_all("r")} == {"new": "0.10.1"}
