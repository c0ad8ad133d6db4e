import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, StorageFailed
from fleet.datasets.imagefolder import read_imagefolder
from fleet.datasets.samples import Samples
from fleet.partition import (
    DeviceCounts,
    PartitionSummary,
    deal,
    partition_command,
    summary_table,
    write_device_folders,
    write_plot,
)
from fleet.partitions.feature_noise import add_noise

CLASSES = ("ant", "bee", "cow")


def made(labels: list[int], classes: tuple[str, ...] = CLASSES) -> Samples:
    """4x4 images; sample i is gray of level i, so that a file tells which sample it was."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)
    return Samples(dataset="made", size=4, images=images, labels=np.array(labels, dtype=np.int64), classes=classes)


def write_source(folder: Path) -> Path:
    """20 cats and 20 dogs."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (4, 4), (number,) * 3).save(folder / name / f"{number}.png")
    return folder


def written(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


class TestWriteDeviceFolders:
    SAMPLES = made([0] * 10 + [1] * 5)
    PARTS = (np.arange(10), np.arange(10, 15))

    def test_what_is_written(self, tmp_path: Path) -> None:
        """Share .2: of 10 ants 2, of 5 bees 1 go to test. The class cow, without images, has folders everywhere."""
        out = tmp_path / "parts"
        summary = write_device_folders(self.SAMPLES, self.PARTS, out, test_share=0.2, seed=0)
        assert summary.devices == (
            DeviceCounts("device-0", {"ant": 8, "bee": 0, "cow": 0}, {"ant": 2, "bee": 0, "cow": 0}),
            DeviceCounts("device-1", {"ant": 0, "bee": 4, "cow": 0}, {"ant": 0, "bee": 1, "cow": 0}),
        )
        for device in ("device-0", "device-1"):
            for part in ("train", "test"):
                assert sorted(path.name for path in (out / device / part).iterdir()) == list(CLASSES)
        names = sorted(path.name for path in (out / "device-0/train/ant").iterdir())
        assert names == [f"{number:04d}.png" for number in range(8)]
        levels = [Image.open(path).getpixel((0, 0))[0] for path in out.rglob("*.png")]  # type: ignore[index]
        assert sorted(levels) == list(range(15))

    @given(
        labels=st.lists(st.integers(0, 2), min_size=6, max_size=60),
        devices=st.integers(1, 3),
        name=st.sampled_from(["iid", "dirichlet", "disjoint"]),
        shares=st.tuples(st.floats(0.05, 0.6), st.floats(0.05, 0.6)),
        seed=st.integers(0, 5),
    )
    @settings(max_examples=25)
    def test_validation_images_are_training_images(
        self, labels: list[int], devices: int, name: str, shares: tuple[float, float], seed: int
    ) -> None:
        """Whatever the partition: no test image is among them, and together with what trains they are all of those."""
        test_share, validation_share = shares
        options = {"min_samples": 1} if name == "dirichlet" else {}
        with tempfile.TemporaryDirectory() as folder:

            def levels(place: str, part: str, device: int) -> set[int]:
                files = Path(folder, place, f"device-{device}", part).rglob("*.png")
                return {Image.open(path).getpixel((0, 0))[0] for path in files}  # type: ignore[index]

            def dealt(place: str, share: float | None) -> None:
                deal(
                    made(labels), name, devices, Path(folder, place), options=options, seed=seed,
                    test_share=test_share, validation_share=share,
                )  # fmt: skip

            try:
                dealt("whole", None)
                dealt("search", validation_share)
            except ConfigError:  # too few images for so many devices
                assume(False)
            for device in range(devices):
                train, validation = levels("search", "train", device), levels("search", "test", device)
                assert validation
                assert train
                assert not train & validation
                assert train | validation == levels("whole", "train", device)
                assert not validation & levels("whole", "test", device)

    def test_device_without_a_validation_image_is_named(self, tmp_path: Path) -> None:
        """Device 1 has one image of each class, and one of each has to train."""
        samples = made([0] * 10 + [0, 1, 2])
        with pytest.raises(ConfigError, match=r"validation_share = 0\.5 leaves device-1 without .* its 3 training"):
            write_device_folders(
                samples, (np.arange(10), np.arange(10, 13)), tmp_path / "parts", test_share=0.2, validation_share=0.5,
                seed=0,
            )  # fmt: skip
        assert not (tmp_path / "parts").exists()

    def test_a_plain_dirichlet_draw_that_leaves_a_device_empty_is_refused(self, tmp_path: Path) -> None:
        """One class among 4 devices with alpha .001 goes to one of them; no folder is written."""
        with pytest.raises(ConfigError, match=r"dirichlet: device \d of 4 would get no sample.* or min_samples = 1"):
            deal(made([0] * 20), "dirichlet", 4, tmp_path / "parts", options={"alpha": 0.001, "min_samples": 0}, seed=0)
        assert not (tmp_path / "parts").exists()

    def test_a_device_can_use_its_folder(self, tmp_path: Path) -> None:
        write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0)
        data = DeviceData.open(tmp_path / "parts/device-1")
        assert sorted([*data.classes, *data.empty]) == sorted(CLASSES)
        assert data.relabel(CLASSES).train.labels.tolist() == [1] * 4
        images, readable = data.train.load(np.arange(4), 4)
        assert readable.all()
        assert set(images.ravel()) <= set(range(10, 15))

    def test_the_record(self, tmp_path: Path) -> None:
        out = tmp_path / "parts"
        options = {"alpha": 0.5, "cap": True, "min_samples": 3}
        summary = write_device_folders(
            self.SAMPLES, self.PARTS, out, test_share=0.2, seed=7, partition="dirichlet", options=options
        )
        raw = (out / "partition.json").read_bytes()
        assert msgspec.json.decode(raw, type=PartitionSummary) == summary
        record = json.loads(raw)
        assert record["dataset"] == "made"
        assert record["partition"] == "dirichlet"
        assert record["options"] == options
        assert record["seed"] == 7
        assert record["classes"] == list(CLASSES)
        assert record["devices"][0] == {
            "name": "device-0",
            "train": {"ant": 8, "bee": 0, "cow": 0},
            "test": {"ant": 2, "bee": 0, "cow": 0},
            "noise_std": 0.0,
            "source": None,
        }

    def test_noise_is_in_the_files_of_train_and_test(self, tmp_path: Path) -> None:
        """Device 0 has none, so its pixels are as they were; device 1 has 30 gray levels. A sample's noise is
        that of its place in the data set, so the files of a sample are the same on any device."""
        gray = made([0] * 10)
        samples = replace(gray, images=np.full_like(gray.images, 128))
        parts = (np.arange(5), np.arange(5, 10))
        summary = write_device_folders(
            samples, parts, tmp_path / "parts", test_share=0.2, seed=3, noise_stds=[0.0, 30.0]
        )
        assert [device.noise_std for device in summary.devices] == [0.0, 30.0]
        read = {
            device: [np.asarray(Image.open(path)) for path in sorted((tmp_path / "parts" / device).rglob("*.png"))]
            for device in ("device-0", "device-1")
        }
        assert all((image == 128).all() for image in read["device-0"])
        expected = {
            add_noise(np.full((4, 4, 3), 128, np.uint8), 30.0, seed=3, sample=row).tobytes() for row in range(5, 10)
        }
        assert {image.tobytes() for image in read["device-1"]} == expected

    def test_the_seed_decides(self, tmp_path: Path) -> None:
        for name, seed in (("first", 0), ("again", 0), ("other", 1)):
            write_device_folders(self.SAMPLES, self.PARTS, tmp_path / name, test_share=0.2, seed=seed)
        first, again, other = (written(tmp_path / name) for name in ("first", "again", "other"))
        assert first == again
        assert first != other

    def test_no_test_share(self, tmp_path: Path) -> None:
        summary = write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0, seed=0)
        assert [sum(device.test.values()) for device in summary.devices] == [0, 0]
        assert len(DeviceData.open(tmp_path / "parts/device-0").train) == 10

    def test_an_empty_folder_is_free(self, tmp_path: Path) -> None:
        (tmp_path / "parts").mkdir()
        write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0)
        assert [path.name for path in tmp_path.iterdir()] == ["parts"]

    def test_a_folder_that_holds_something_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts/mine.txt").write_text("keep me")
        with pytest.raises(ConfigError, match=r"parts is not empty; .*--overwrite"):
            write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0)
        with pytest.raises(ConfigError, match=r"parts holds no partition\.json, so it is no earlier partition"):
            write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0, overwrite=True)
        assert written(tmp_path / "parts") == {"mine.txt": b"keep me"}

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "parts").touch()
        with pytest.raises(ConfigError, match="parts is a file"):
            write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0, overwrite=True)

    def test_an_earlier_partition_is_replaced_whole(self, tmp_path: Path) -> None:
        out = tmp_path / "parts"
        write_device_folders(self.SAMPLES, self.PARTS, out, test_share=0.2, seed=0)
        write_device_folders(self.SAMPLES, (np.arange(15),), out, test_share=0.2, seed=0, overwrite=True)
        assert sorted(path.name for path in out.iterdir()) == ["device-0", "partition.json"]
        assert [path.name for path in tmp_path.iterdir()] == ["parts"]

    def test_behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "parts").symlink_to(tmp_path / "disk")
        write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0)
        assert (tmp_path / "disk/partition.json").is_file()

    def test_a_run_that_breaks_leaves_what_was_there(self, tmp_path: Path) -> None:
        """Class names that no disk takes: the second class fails after the first was written."""
        out = tmp_path / "parts"
        write_device_folders(self.SAMPLES, self.PARTS, out, test_share=0.2, seed=0)
        before = written(out)
        broken = made([0, 0, 1, 1], classes=("ant", "b" * 300))
        with pytest.raises(StorageFailed, match=r"cannot write device folders to .*parts: File name too long"):
            write_device_folders(broken, (np.arange(4),), out, test_share=0.2, seed=0, overwrite=True)
        assert written(out) == before
        assert [path.name for path in tmp_path.iterdir()] == ["parts"]

    def test_a_run_that_breaks_leaves_nothing_half(self, tmp_path: Path) -> None:
        broken = made([0, 0, 1, 1], classes=("ant", "b" * 300))
        with pytest.raises(StorageFailed):
            write_device_folders(broken, (np.arange(4),), tmp_path / "parts", test_share=0.2, seed=0)
        assert list(tmp_path.iterdir()) == []

    def test_images_that_break_late_are_left_out_and_listed(self, tmp_path: Path) -> None:
        source = tmp_path / "source/ant"
        source.mkdir(parents=True)
        noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        for number in range(3):
            Image.fromarray(noise).save(source / f"{number}.png")
        (source / "1.png").write_bytes((source / "1.png").read_bytes()[:500])
        (source / "3.png").write_text("no image")
        samples = read_imagefolder(tmp_path / "source", 4)
        summary = write_device_folders(samples, (np.arange(3),), tmp_path / "parts", test_share=0, seed=0)
        assert summary.devices[0].train == {"ant": 2}
        assert [Path(line.split(":")[0]).name for line in summary.unreadable] == ["3.png", "1.png"]
        assert sorted(path.name for path in (tmp_path / "parts/device-0/train/ant").iterdir()) == [
            "0000.png",
            "0001.png",
        ]


class TestDeal:
    def test_samples(self, tmp_path: Path) -> None:
        """3 classes of 6 among 3 devices, a class each."""
        samples = made([0, 1, 2] * 6)
        summary = deal(samples, "disjoint", 3, tmp_path / "parts", test_share=0, seed=1)
        assert sorted(sum(device.train.values()) for device in summary.devices) == [6, 6, 6]
        assert {max(device.train.values()) for device in summary.devices} == {6}
        assert summary.partition == "disjoint"
        assert not (tmp_path / "parts/partition.png").exists()

    def test_it_writes_what_the_command_writes(self, tmp_path: Path) -> None:
        source = write_source(tmp_path / "source")
        deal(str(source), "pathological", 4, tmp_path / "a", options={"classes_per_device": 1}, seed=2, size=4)
        arguments = ["--dataset", str(source), "--devices", "4", "--partition", "pathological", "--seed", "2"]
        arguments += ["-p", "classes_per_device=1", "--size", "4", "--out", str(tmp_path / "b")]
        CliRunner().invoke(partition_command, arguments, catch_exceptions=False)
        assert written(tmp_path / "a") == written(tmp_path / "b")

    def test_coarse_labels_and_domains_reach_the_partition(self, tmp_path: Path) -> None:
        labels = np.array([0, 1, 2, 2] * 5)
        samples = replace(
            made(labels.tolist()), coarse_labels=labels // 2, domains=np.arange(20) % 2, domain_names=("art", "photo")
        )
        summary = deal(samples, "domain", 2, tmp_path / "domain", test_share=0)
        assert summary.domains == ("art", "photo")
        assert [device.train for device in summary.devices] == [
            {"ant": 5, "bee": 0, "cow": 5},
            {"ant": 0, "bee": 5, "cow": 5},
        ]
        summary = deal(samples, "coarse_iid", 2, tmp_path / "coarse", test_share=0)
        assert [device.train for device in summary.devices] == [
            {"ant": 5, "bee": 5, "cow": 0},
            {"ant": 0, "bee": 0, "cow": 10},
        ]

    def test_global_test_is_of_no_device(self, tmp_path: Path) -> None:
        """Of 10 ants and 20 bees a tenth; the remaining 27 images are dealt out, with their domains."""
        samples = replace(made([0] * 10 + [1] * 20), domains=np.arange(30) % 3, domain_names=("art", "clip", "photo"))
        summary = deal(samples, "domain", 3, tmp_path / "parts", global_test=0.1, seed=4)
        assert summary.global_test == 0.1
        gray = {file: int(np.asarray(Image.open(file))[0, 0, 0]) for file in (tmp_path / "parts").rglob("*.png")}
        apart = {level for file, level in gray.items() if "global-test" in file.parts}
        assert sorted(level < 10 for level in apart) == [False, False, True]
        assert sorted(gray.values()) == list(range(30))
        for file, level in gray.items():
            assert level in apart or level % 3 == int(file.relative_to(tmp_path / "parts").parts[0][-1])

    def test_noise_and_complete_options_are_recorded(self, tmp_path: Path) -> None:
        summary = deal(made([0] * 9), "feature_noise", 3, tmp_path / "parts", options={"max_std": "10"})
        assert [device.noise_std for device in summary.devices] == [0, 5, 10]
        assert summary.options == {"max_std": 10.0}
        assert deal(made([0] * 9), "feature_noise", 3, tmp_path / "more").options == {"max_std": 20.0}

    def test_refusals_come_before_a_data_set_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "parts").touch()
        with pytest.raises(ConfigError, match="parts is a file"):
            deal("gone", "iid", 2, tmp_path / "parts")
        with pytest.raises(ConfigError, match="partition 'pareto' is not known"):
            deal("gone", "pareto", 2, tmp_path / "other")
        with pytest.raises(ConfigError, match="data set 'gone' is neither"):
            deal("gone", "iid", 2, tmp_path / "other")

    def test_a_picture(self, tmp_path: Path) -> None:
        deal(made([0, 1] * 5), "iid", 2, tmp_path / "parts", plot=True)
        with Image.open(tmp_path / "parts/partition.png") as picture:
            assert picture.format == "PNG"

    def test_a_picture_that_cannot_be_written(self, tmp_path: Path) -> None:
        summary = deal(made([0, 1] * 5), "iid", 2, tmp_path / "parts")
        with pytest.raises(StorageFailed, match=r"cannot write .*gone/partition\.png: No such file"):
            write_plot(summary, tmp_path / "gone/partition.png")


class TestSummaryTable:
    def rendered(self, classes: tuple[str, ...], *devices: DeviceCounts) -> str:
        summary = PartitionSummary(
            dataset="made",
            classes=classes,
            size=4,
            partition=None,
            options={},
            seed=0,
            test_share=0.2,
            devices=devices,
        )
        screen = io.StringIO()
        Console(file=screen, width=80).print(summary_table(summary))
        return screen.getvalue()

    def test_counts(self) -> None:
        """8 + 1 of the ants; a class that a device has nothing of is a dot; long names are cut."""
        shown = self.rendered(
            ("ant", "bumblebee", "[red]"),
            DeviceCounts("device-0", {"ant": 8, "bumblebee": 0, "[red]": 3}, {"ant": 1, "bumblebee": 0, "[red]": 1}),
        )
        heading, _, row = shown.splitlines()[:3]
        assert heading.split() == ["device", "train", "test", "ant", "bum…", "[re…"]
        assert row.split() == ["device-0", "11", "2", "9", "·", "4"]

    def test_ten_classes_fit_a_terminal(self) -> None:
        classes = tuple(f"class-{number}" for number in range(10))
        counts = dict.fromkeys(classes, 4000)
        row = self.rendered(classes, DeviceCounts("device-0", counts, counts)).splitlines()[2]
        assert row.split() == ["device-0", "40000", "40000", *["8000"] * 10]

    def test_many_classes_are_summed_up(self) -> None:
        """Of 11 classes the device holds two, most of them the second."""
        classes = tuple(f"class-{number}" for number in range(11))
        train = dict.fromkeys(classes, 0) | {"class-3": 1, "class-4": 2}
        shown = self.rendered(classes, DeviceCounts("device-0", train, dict.fromkeys(classes, 0)))
        assert shown.splitlines()[2].split() == ["device-0", "3", "0", "2", "class-4"]

    def test_a_device_without_samples(self) -> None:
        classes = tuple(f"class-{number}" for number in range(11))
        nothing = dict.fromkeys(classes, 0)
        assert self.rendered(classes, DeviceCounts("device-0", nothing, nothing)).splitlines()[2].split() == [
            "device-0",
            "0",
            "0",
            "0",
        ]


class TestCommand:
    def invoke(self, *arguments: str) -> Result:
        return CliRunner().invoke(partition_command, arguments, catch_exceptions=False)

    def test_digits(self, tmp_path: Path) -> None:
        out = tmp_path / "parts"
        result = self.invoke("--devices", "3", "--alpha", "0.5", "--out", str(out), "--size", "8")
        assert result.exit_code == 0
        assert "device-2" in result.stdout
        assert f"digits dealt out to 3 devices in {out}" in result.stdout
        record = json.loads((out / "partition.json").read_bytes())
        assert record["partition"] == "dirichlet"
        assert record["options"] == {"alpha": 0.5, "cap": False, "min_samples": 10}
        totals = [sum(device["train"].values()) + sum(device["test"].values()) for device in record["devices"]]
        assert sum(totals) == 1797
        assert min(totals) >= 10
        assert len(list(out.rglob("*.png"))) == 1797

    def test_json_is_the_record(self, tmp_path: Path) -> None:
        result = self.invoke("--out", str(tmp_path / "parts"), "--size", "8", "--partition", "iid", "--json")
        record = json.loads(result.stdout)
        assert record == json.loads((tmp_path / "parts/partition.json").read_bytes())
        assert record["options"] == {}
        assert record["seed"] == 0

    def test_a_folder_of_images(self, tmp_path: Path) -> None:
        write_source(tmp_path / "source")
        (tmp_path / "source/cat/bad.png").write_text("no image")
        result = self.invoke("--dataset", str(tmp_path / "source"), "--devices", "2", "--out", str(tmp_path / "parts"))
        assert "left out 1 images, the first: cannot read image" in result.stdout
        assert len(DeviceData.open(tmp_path / "parts/device-0").train) > 0

    def test_errors_are_left_to_the_caller(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="iid has no option 'alpha'"):
            self.invoke("--partition", "iid", "--alpha", "1", "--out", str(tmp_path / "parts"))
        with pytest.raises(ConfigError, match="neither a path"):
            self.invoke("--dataset", str(tmp_path / "gone"), "--out", str(tmp_path / "parts"))
        (tmp_path / "parts").touch()
        with pytest.raises(ConfigError, match="parts is a file"):
            self.invoke("--out", str(tmp_path / "parts"))

    def test_options_of_the_partition(self, tmp_path: Path) -> None:
        source = write_source(tmp_path / "source")
        arguments = ("--dataset", str(source), "--devices", "2", "--out", str(tmp_path / "parts"), "--json")
        result = self.invoke(*arguments, "-p", "alpha=0.7", "-p", "cap=true", "--min-samples", "5")
        assert json.loads(result.stdout)["options"] == {"alpha": 0.7, "cap": True, "min_samples": 5}

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (("-p", "alpha"), "partition option 'alpha' must be written KEY=VALUE"),
            (("-p", "alpha=1", "--alpha", "2"), "partition option alpha is given twice: 2.0 and 1"),
            (("-p", "alpha=much"), "partition dirichlet: alpha is 'much', expected float"),
            (("-p", "beta=1"), "dirichlet has no option 'beta'; it has: alpha, cap, min_samples"),
            (("--min-samples", "-1"), "min_samples is -1, expected >= 0"),
        ],
    )
    def test_bad_options(self, tmp_path: Path, given: tuple[str, ...], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.invoke("--out", str(tmp_path / "parts"), *given)

    def test_help_lists_the_options_of_every_partition(self) -> None:
        shown = " ".join(self.invoke("--help").stdout.split())
        for text in ("dirichlet: alpha=0.3, cap=false, min_samples=10", "classes_per_device=2", "max_std=20.0"):
            assert text in shown

    def test_a_picture(self, tmp_path: Path) -> None:
        """4 devices by 2 classes, as lines and as a file."""
        out = tmp_path / "parts"
        result = self.invoke(
            "--dataset", str(write_source(tmp_path / "source")), "--out", str(out), "--plot", "--min-samples", "1"
        )
        assert f"picture: {out / 'partition.png'}" in result.stdout
        lines = [line for line in result.stdout.splitlines() if line.count("|") == 2]
        assert [line.split()[0] for line in lines] == [f"device-{number}" for number in range(4)]
        assert (out / "partition.png").is_file()

    def test_a_picture_beside_json(self, tmp_path: Path) -> None:
        out = tmp_path / "parts"
        source = write_source(tmp_path / "source")
        result = self.invoke("--dataset", str(source), "--out", str(out), "--min-samples", "1", "--plot", "--json")
        assert json.loads(result.stdout)["dataset"] == "source"
        assert (out / "partition.png").is_file()

    def test_overwrite(self, tmp_path: Path) -> None:
        arguments = ("--out", str(tmp_path / "parts"), "--size", "8")
        self.invoke(*arguments)
        with pytest.raises(ConfigError, match="not empty"):
            self.invoke(*arguments)
        assert self.invoke(*arguments, "--overwrite", "--devices", "2").exit_code == 0
        assert not (tmp_path / "parts/device-2").exists()

    @pytest.mark.parametrize(
        "wrong", [("--devices", "0"), ("--test-share", "1"), ("--size", "0"), ("--partition", "x")]
    )
    def test_values_that_click_refuses(self, wrong: tuple[str, str]) -> None:
        assert self.invoke(*wrong).exit_code == 2
