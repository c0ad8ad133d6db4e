"""Device folders: their images, their record, and refusals that leave earlier files unchanged."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedvit.data.folder import DeviceData
from fedvit.errors import ConfigError, StorageFailed
from fleet.datasets.imagefolder import read_imagefolder
from fleet.datasets.samples import Samples
from fleet.partition import (
    DealSettings,
    DeviceCounts,
    Division,
    PartitionSummary,
    deal,
    write_device_folders,
    write_division,
)
from fleet.partitions.feature_noise import add_noise
from tests.support.codes import has_code

CLASSES = ("ant", "bee", "cow")


def make_samples(labels: list[int], classes: tuple[str, ...] = CLASSES) -> Samples:
    """4x4 images; sample i is gray of level i, so that a file tells which sample it was."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2).repeat(3, 3)
    return Samples(dataset="made", size=4, images=images, labels=np.array(labels, dtype=np.int64), classes=classes)


def read_files(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


class TestWriteDeviceFolders:
    SAMPLES = make_samples([0] * 10 + [1] * 5)
    PARTS = (np.arange(10), np.arange(10, 15))

    def test_what_is_read_files(self, tmp_path: Path) -> None:
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
                    make_samples(labels),
                    name,
                    devices,
                    Path(folder, place),
                    DealSettings(options=options, seed=seed, test_share=test_share, validation_share=share),
                )

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
        samples, division = make_samples([0] * 10 + [0, 1, 2]), Division((np.arange(10), np.arange(10, 13)))
        with pytest.raises(ConfigError, check=has_code("FV2112", "device-1")):
            write_division(samples, division, tmp_path / "parts", DealSettings(validation_share=0.5))
        assert not (tmp_path / "parts").exists()

    def test_a_plain_dirichlet_draw_that_leaves_a_device_empty_is_refused(self, tmp_path: Path) -> None:
        """One class among 4 devices with alpha .001 goes to one of them; no folder is written."""
        settings = DealSettings(options={"alpha": 0.001, "min_samples": 0})
        with pytest.raises(ConfigError):
            deal(make_samples([0] * 20), "dirichlet", 4, tmp_path / "parts", settings)
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
        division = Division(self.PARTS, "dirichlet", options)
        summary = write_division(self.SAMPLES, division, out, DealSettings(seed=7))
        raw = (out / "partition.json").read_bytes()
        assert msgspec.json.decode(raw, type=PartitionSummary) == summary
        record = json.loads(raw)
        assert (record["dataset"], record["partition"], record["options"]) == ("made", "dirichlet", options)
        assert (record["seed"], record["classes"]) == (7, list(CLASSES))
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
        gray = make_samples([0] * 10)
        samples = replace(gray, images=np.full_like(gray.images, 128))
        division = Division((np.arange(5), np.arange(5, 10)), noise_stds=[0.0, 30.0])
        summary = write_division(samples, division, tmp_path / "parts", DealSettings(seed=3))
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
        first, again, other = (read_files(tmp_path / name) for name in ("first", "again", "other"))
        assert first == again
        assert first != other

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_occupied_place_is_refused(self, tmp_path: Path, overwrite: bool) -> None:
        """An empty folder is free; a file and a folder that is not a partition are never overwritten."""
        (tmp_path / "free").mkdir()
        settings = DealSettings(overwrite=overwrite)
        write_division(self.SAMPLES, Division(self.PARTS), tmp_path / "free", settings)
        (tmp_path / "parts").mkdir()
        (tmp_path / "parts/mine.txt").write_text("keep me")
        (tmp_path / "file").touch()
        for place in ("parts", "file"):
            with pytest.raises(ConfigError, check=has_code("FV2007", place)):
                write_division(self.SAMPLES, Division(self.PARTS), tmp_path / place, settings)
        assert read_files(tmp_path / "parts") == {"mine.txt": b"keep me"}

    def test_an_earlier_partition_is_replaced_whole(self, tmp_path: Path) -> None:
        out = tmp_path / "parts"
        write_device_folders(self.SAMPLES, self.PARTS, out, test_share=0.2, seed=0)
        write_division(self.SAMPLES, Division([np.arange(15)]), out, DealSettings(overwrite=True))
        assert sorted(path.name for path in out.iterdir()) == ["device-0", "partition.json"]
        assert [path.name for path in tmp_path.iterdir()] == ["parts"]

    def test_behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "parts").symlink_to(tmp_path / "disk")
        write_device_folders(self.SAMPLES, self.PARTS, tmp_path / "parts", test_share=0.2, seed=0)
        assert (tmp_path / "disk/partition.json").is_file()

    @pytest.mark.parametrize("has_earlier", [False, True])
    def test_failure_leaves_earlier_files_unchanged(self, tmp_path: Path, has_earlier: bool) -> None:
        """Class names that no disk takes: the second class fails after the first was written."""
        out = tmp_path / "parts"
        if has_earlier:
            write_device_folders(self.SAMPLES, self.PARTS, out, test_share=0.2, seed=0)
        before = read_files(tmp_path)
        too_long = make_samples([0, 0, 1, 1], classes=("ant", "b" * 300))
        with pytest.raises(StorageFailed, check=has_code("FV1701", "parts")):
            write_division(too_long, Division([np.arange(4)]), out, DealSettings(overwrite=True))
        assert read_files(tmp_path) == before
        assert len(list(tmp_path.iterdir())) == has_earlier

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
        assert sorted(read_files(tmp_path / "parts/device-0/train/ant")) == ["0000.png", "0001.png"]


class TestDeal:
    def test_samples(self, tmp_path: Path) -> None:
        """3 classes of 6 among 3 devices, a class each."""
        samples = make_samples([0, 1, 2] * 6)
        summary = deal(samples, "disjoint", 3, tmp_path / "parts", DealSettings(test_share=0, seed=1))
        assert sorted(sum(device.train.values()) for device in summary.devices) == [6, 6, 6]
        assert {max(device.train.values()) for device in summary.devices} == {6}
        assert summary.partition == "disjoint"

    def test_coarse_labels_and_domains_reach_the_partition(self, tmp_path: Path) -> None:
        labels = np.array([0, 1, 2, 2] * 5)
        samples = replace(
            make_samples(labels.tolist()),
            coarse_labels=labels // 2,
            domains=np.arange(20) % 2,
            domain_names=("art", "photo"),
        )
        summary = deal(samples, "domain", 2, tmp_path / "domain", DealSettings(test_share=0))
        assert summary.domains == ("art", "photo")
        assert [device.train for device in summary.devices] == [
            {"ant": 5, "bee": 0, "cow": 5},
            {"ant": 0, "bee": 5, "cow": 5},
        ]
        summary = deal(samples, "coarse_iid", 2, tmp_path / "coarse", DealSettings(test_share=0))
        assert [device.train for device in summary.devices] == [
            {"ant": 5, "bee": 5, "cow": 0},
            {"ant": 0, "bee": 0, "cow": 10},
        ]

    def test_global_test_is_of_no_device(self, tmp_path: Path) -> None:
        """Of 10 ants and 20 bees a tenth; the remaining 27 images are dealt out, with their domains."""
        samples = replace(
            make_samples([0] * 10 + [1] * 20), domains=np.arange(30) % 3, domain_names=("art", "clip", "photo")
        )
        summary = deal(samples, "domain", 3, tmp_path / "parts", DealSettings(global_test=0.1, seed=4))
        assert summary.global_test == 0.1
        gray = {file: int(np.asarray(Image.open(file))[0, 0, 0]) for file in (tmp_path / "parts").rglob("*.png")}
        apart = {level for file, level in gray.items() if "global-test" in file.parts}
        assert sorted(level < 10 for level in apart) == [False, False, True]
        assert sorted(gray.values()) == list(range(30))
        for file, level in gray.items():
            assert level in apart or level % 3 == int(file.relative_to(tmp_path / "parts").parts[0][-1])

    def test_drawn_samples(self, tmp_path: Path) -> None:
        """Another seed draws others; another number of devices does not."""
        drawn = []
        for devices, seed in ((2, 0), (3, 0), (2, 1)):
            out = tmp_path / f"{devices}-{seed}"
            deal(make_samples([0] * 15 + [1] * 15), "iid", devices, out, DealSettings(seed=seed, samples=12))
            drawn.append({int(np.asarray(Image.open(file))[0, 0, 0]) for file in out.rglob("*.png")})
        assert [len(levels) for levels in drawn] == [12, 12, 12]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_the_most_frequent_classes(self, tmp_path: Path) -> None:
        """The two with nine images of four classes with 3, 9, 6 and 9, of which one domain has none."""
        labels = [0] * 3 + [1] * 9 + [2] * 6 + [3] * 9
        samples = make_samples(labels, ("ant", "bee", "cat", "dog"))
        samples = replace(
            samples, domains=np.array([2] * 3 + [0] * 9 + [1] * 6 + [1] * 9), domain_names=("p", "q", "r")
        )
        summary = deal(samples, "domain", 2, tmp_path / "parts", DealSettings(classes=2))
        assert summary.classes == ("bee", "dog")
        assert [device.total("bee") for device in summary.devices] == [9, 0]
        assert [device.total("dog") for device in summary.devices] == [0, 9]
        gray = {int(np.asarray(Image.open(file))[0, 0, 0]) for file in (tmp_path / "parts").rglob("*.png")}
        assert gray == {*range(3, 12), *range(18, 27)}

    def test_official_test_images_test(self, tmp_path: Path) -> None:
        """Every third of 30 images is in the data set's own test split."""
        samples = replace(make_samples([0] * 15 + [1] * 15), official_test=np.arange(30) % 3 == 0)
        summary = deal(samples, "iid", 2, tmp_path / "parts", DealSettings(test_share="official"))
        assert summary.test_share == "official"
        gray = {file: int(np.asarray(Image.open(file))[0, 0, 0]) for file in (tmp_path / "parts").rglob("*.png")}
        assert sorted(gray.values()) == list(range(30))
        assert all(("test" in file.parts) == (level % 3 == 0) for file, level in gray.items())

    def test_official_test_images_are_of_no_device(self, tmp_path: Path) -> None:
        samples = replace(make_samples([0] * 15 + [1] * 15), official_test=np.arange(30) % 3 == 0)
        deal(samples, "iid", 2, tmp_path / "parts", DealSettings(global_test="official", test_share=0.5))
        gray = {file: int(np.asarray(Image.open(file))[0, 0, 0]) for file in (tmp_path / "parts").rglob("*.png")}
        assert all(("global-test" in file.parts) == (level % 3 == 0) for file, level in gray.items())
        assert {"train", "test"} <= {part for file in gray for part in file.parts}

    @pytest.mark.parametrize(
        ("settings", "has_split", "code"),
        [
            (DealSettings(test_share="official"), False, "FV2013"),
            (DealSettings(global_test="official"), False, "FV2013"),
            (DealSettings(test_share="official", global_test="official"), True, "FV2013"),
            (DealSettings({"classes_per_device": 1}, test_share="official"), True, "FV2003"),
            (DealSettings(global_test="official", samples=2), True, "FV2003"),
            (DealSettings(samples=31), True, "FV2150"),
            (DealSettings(classes=3), True, "FV2150"),
        ],
    )
    def test_official_splits_that_do_not_fit(
        self, tmp_path: Path, settings: DealSettings, has_split: bool, code: str
    ) -> None:
        """All images of the second class are test images, so that its device has none to train with."""
        flags = np.arange(30) >= 15 if has_split else None
        samples = replace(make_samples([0] * 15 + [1] * 15, ("ant", "bee")), official_test=flags)
        partition = "pathological" if settings.options else "iid"
        with pytest.raises(ConfigError, check=has_code(code)):
            deal(samples, partition, 2, tmp_path / "parts", settings)
        assert not (tmp_path / "parts").exists()

    def test_noise_and_complete_options_are_recorded(self, tmp_path: Path) -> None:
        summary = deal(
            make_samples([0] * 9), "feature_noise", 3, tmp_path / "parts", DealSettings(options={"max_std": "10"})
        )
        assert [device.noise_std for device in summary.devices] == [0, 5, 10]
        assert summary.options == {"max_std": 10.0}
        assert deal(make_samples([0] * 9), "feature_noise", 3, tmp_path / "more").options == {"max_std": 20.0}

    def test_refusals_come_before_a_data_set_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "parts").touch()
        for place, partition, code in (
            ("parts", "iid", "FV2007"),
            ("other", "pareto", "FV2002"),
            ("other", "iid", "FV2001"),
        ):
            with pytest.raises(ConfigError, check=has_code(code)):
                deal("gone", partition, 2, tmp_path / place)
