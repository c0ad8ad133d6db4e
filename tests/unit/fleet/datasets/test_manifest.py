"""CSV files that list images, and paths that lead out of their folder."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvit.errors import DataError
from fleet.datasets import read_samples
from fleet.datasets.columns import Columns
from fleet.datasets.manifest import read_manifest
from tests.support.codes import has_code


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "images").mkdir(exist_ok=True)
    for number in range(4):
        Image.new("RGB", (4, 4), (number,) * 3).save(folder / "images" / f"{number}.png")
    (folder / "list.csv").write_text(text)
    return folder / "list.csv"


def test_images_with_domain_and_split(tmp_path: Path) -> None:
    path = write(
        tmp_path / "set",
        "path,label,domain,split\nimages/2.png,dog,b,train\nimages/0.png,cat,a,test\nimages/1.png,dog,a,train\n",
    )
    samples = read_samples(str(path), 4)
    assert samples.dataset == "set"
    assert samples.classes == ("cat", "dog")
    assert samples.labels.tolist() == [1, 0, 1]
    assert samples.images[np.arange(3)][:, 0, 0, 0].tolist() == [2, 0, 1]
    assert samples.domain_names == ("a", "b")
    assert samples.domains is not None
    assert samples.domains.tolist() == [1, 0, 0]
    assert samples.official_test is not None
    assert samples.official_test.tolist() == [False, True, False]


def test_columns_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "\N{ZERO WIDTH NO-BREAK SPACE}image,kind,x\nimages/1.png,owl,1\nimages/2.png,hen,2\n")
    samples = read_samples(str(path), 4, Columns(label="kind", domain="x"))
    assert (samples.classes, samples.domain_names) == (("hen", "owl"), ("1", "2"))
    assert samples.official_test is None


@pytest.mark.parametrize(
    ("column", "cell", "code", "named"),
    [
        ("labels", "0.5", "FV2011", "column labels as numbers"),
        ("split", "0.5", "FV2011", "column split as numbers"),
        ("height", "1e10", "FV2008", "line 2: height is '1e10', expected a number of at most 1e+09"),
        ("height", "nan", "FV2008", "line 2: height is 'nan'"),
    ],
)
def test_numbers_that_a_device_would_not_read_are_refused(
    tmp_path: Path, column: str, cell: str, code: str, named: str
) -> None:
    path = write(tmp_path, f"path,{column}\nimages/1.png,{cell}\n")
    with pytest.raises(DataError, check=has_code(code, named)):
        read_samples(str(path), 4, Columns(number=column))


def test_lines_without_label_or_image_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "path,label\nimages/0.png,a\nimages/1.png,\nimages/9.png,b\nlist.csv,b\n")
    samples = read_manifest(path, 4)
    assert len(samples) == 1
    assert samples.classes == ("a",)
    assert samples.unreadable[0].startswith("no label: ")
    assert len(samples.unreadable) == 3


@pytest.mark.parametrize("name", ["../outside.png", "/etc/hostname", "images/link.png", "images/../../outside.png"])
def test_paths_that_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "set", f"path,label\nimages/0.png,a\n{name},a\n")
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    (tmp_path / "set" / "images" / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(DataError, check=has_code("FV2009", "line 3")):
        read_manifest(path, 4)


@pytest.mark.parametrize(
    ("text", "code", "name"),
    [
        ("", "FV2011", "path"),
        ("path,kind\nimages/0.png,a\n", "FV2011", "label"),
        ("a,label\nimages/0.png,a\n", "FV2011", "path"),
        ("path,label\nimages/0.png,a,b\n", "FV2008", "line 2"),
        ('path,label\n"images/0.png,a\n', "FV2008", "list.csv"),
        ("path,label\nimages/7.png,a\n", "FV2008", "7.png"),
        ("path,labels\nimages/0.png,\nimages/1.png, ; \n", "FV2008", "labels"),
    ],
)
def test_error_names_line_and_column(tmp_path: Path, text: str, code: str, name: str) -> None:
    with pytest.raises(DataError, check=has_code(code, name)):
        read_manifest(write(tmp_path, text), 4)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    path.write_bytes(b"path,label\n\xff\xfe,a\n")
    with pytest.raises(DataError, check=has_code("FV2008", "list.csv")):
        read_manifest(path, 4)


def write_masks(folder: Path, cells: list[str]) -> Path:
    rows = "".join(f"images/{place}.png,{cell}\n" for place, cell in enumerate(cells))
    path = write(folder, f"path,mask\n{rows}")
    (folder / "classes.txt").write_text("sky\nroad\ncar\n")
    for place, value in enumerate((0, 1, 9)):
        mask = np.full((4, 4), value, np.uint8)
        mask[:2] = 0
        Image.fromarray(mask).save(folder / "images" / f"mask{place}.png")
    return path


def test_masks_are_dealt_by_what_an_image_has_more_of_than_others(tmp_path: Path) -> None:
    samples = read_manifest(write_masks(tmp_path, ["images/mask0.png", "images/mask1.png", "images/mask2.png"]), 4)
    assert (samples.classes, samples.labels.tolist()) == (("sky", "road", "car"), [0, 1, 0])
    assert samples.other is not None
    np.testing.assert_allclose(samples.other.values, [[1, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0]])


@pytest.mark.parametrize(
    ("cell", "code"), [("../mask0.png", "FV2009"), ("images/none.png", "FV2008"), ("list.csv", "FV2008")]
)
def test_a_mask_that_cannot_be_read_is_refused_by_line(tmp_path: Path, cell: str, code: str) -> None:
    with pytest.raises(DataError, check=has_code(code, "line 3: ")):
        read_manifest(write_masks(tmp_path, ["images/mask0.png", cell]), 4)
