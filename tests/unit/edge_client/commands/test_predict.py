"""`edge-client predict`, for a person and for a program."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_client.cli import cli
from export.bundle.card import Origin
from export.bundle.write import Bench, TrainedModel, write_bundle
from fedvit.errors import ConfigError, DataError
from tests.support.settings import Setting


@pytest.fixture
def bundle(fedavg: Setting, tmp_path: Path) -> Path:
    program = fedavg.program
    trained = TrainedModel(
        graph=fedavg.blobs.get(program.graphs["predict"].digest),
        values={f"tensor/{name}": value for name, value in fedavg.start().items()},
        batch=program.batch,
        classes=program.classes,
        origin=Origin(run="run", method="fedavg", model="tiny", round=0, device=None, made_by="test 1"),
    )
    write_bundle(tmp_path / "bundle", trained, Bench(images=None, described="", threads=1, machine="test", cores=1))
    return tmp_path / "bundle"


def predict(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["predict", *map(str, arguments), "--threads", "1"])


def test_one_line_an_image(bundle: Path, digits: Path) -> None:
    images = sorted((digits / "test").glob("*/*"))[:3]
    done = predict(*images, "--bundle", bundle, "--top", 2)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split(":")[0] for line in lines] == [str(image) for image in images]
    for line in lines:
        (first, high), (second, low) = (part.rsplit(" ", 1) for part in line.split(": ")[1].split(", "))
        assert {first, second} < {"0", "1", "2"}
        assert 1 >= float(high) >= float(low) >= 0


def test_a_folder_stands_for_the_images_in_it(bundle: Path, digits: Path, tmp_path: Path) -> None:
    done = predict(digits / "test", "--bundle", bundle)
    assert [line.split(":")[0] for line in done.output.splitlines()] == [
        str(image) for image in sorted((digits / "test").rglob("*.png"))
    ]
    (tmp_path / "empty").mkdir()
    assert "this folder holds no image" in str(predict(tmp_path / "empty", "--bundle", bundle).exception)


def test_all_classes_as_json(bundle: Path, digits: Path) -> None:
    """More are asked for than there are; their probabilities sum to 1."""
    image = next((digits / "test").glob("*/*"))
    [entry] = json.loads(predict(image, "--bundle", bundle, "--top", 9, "--json", "--precision", "fp16").output)
    assert entry["image"] == str(image)
    assert sorted(answer["label"] for answer in entry["answers"]) == ["0", "1", "2"]
    assert sum(answer["probability"] for answer in entry["answers"]) == pytest.approx(1, abs=1e-5)


def test_a_bad_image_does_not_stop_the_others(bundle: Path, digits: Path, tmp_path: Path) -> None:
    image = next((digits / "test").glob("*/*"))
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    done = predict(tmp_path / "bad.jpg", image, tmp_path / "missing.png", "--bundle", bundle)
    assert isinstance(done.exception, DataError)
    assert str(done.exception) == "2 of 3 images cannot be read"
    [answer] = done.stdout.splitlines()
    assert answer.startswith(f"{image}: ")
    bad, missing = done.stderr.splitlines()
    assert str(tmp_path / "bad.jpg") in bad
    assert f"{tmp_path / 'missing.png'}: No such file or directory" in missing


def test_no_bundle(tmp_path: Path) -> None:
    done = predict("photo.png", "--bundle", tmp_path / "nowhere")
    assert isinstance(done.exception, ConfigError)
    assert str(tmp_path / "nowhere") in str(done.exception)
