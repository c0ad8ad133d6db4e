"""A device's report of a fault has checks and settings, and nothing that its owner keeps private."""

import zipfile
from pathlib import Path

from click.testing import CliRunner
from PIL import Image

from edge_client.cli import cli


def test_report_of_a_device(tmp_path: Path) -> None:
    images = tmp_path / "garden-pictures"
    for name in ("hedgehog", "blackbird"):
        (images / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (32, 32)).save(images / name / f"{number}.png")
    log = tmp_path / "client.log"
    log.write_text(f"started mqtt://ann:pa55word@127.0.0.1:1 with {images}/hedgehog/0.png\n")
    out = tmp_path / "report.zip"
    command = ["--broker", "mqtt://ann:pa55word@127.0.0.1:1", "--data", str(images), "--state", str(tmp_path / "state")]
    CliRunner().invoke(cli, [*command, "bugreport", "--out", str(out), "--log", str(log)], catch_exceptions=False)
    with zipfile.ZipFile(out) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"versions.json", "settings.json", "doctor.txt", "log.txt"} <= files.keys()
    everything = "".join(files.values())
    assert not [word for word in ("pa55word", "hedgehog", "blackbird", "garden-pictures") if word in everything]
    assert "started mqtt://[USER]@127.0.0.1:1 with " in files["log.txt"]
    assert "broker" in files["doctor.txt"]
