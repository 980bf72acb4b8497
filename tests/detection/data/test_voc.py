"""Folders in VOC's layout, complete and damaged."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dsnet.detection.data.dataset import load_detection_dataset
from dsnet.detection.data.summary import report_problems
from dsnet.detection.data.voc import read_voc
from tests.support import error_of

OBJECT = (
    "<object><name>{name}</name><difficult>{hard}</difficult><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin>"
    "<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
)


def write(root: Path, name: str, *objects: tuple[str, tuple[float, ...]], hard: int = 0) -> Path:
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "JPEGImages" / f"{name}.jpg").write_bytes(b"")
    path = root / "Annotations" / f"{name}.xml"
    inner = "".join(OBJECT.format(name=label, box=box, hard=hard) for label, box in objects)
    size = "<size><width>20</width><height>10</height><depth>3</depth></size>"
    path.write_text(f"<annotation>{size}{inner}</annotation>", encoding="utf-8")
    return path


def test_a_folder_and_its_splits(tmp_path: Path) -> None:
    write(tmp_path, "a", ("cat", (1, 1, 20, 10)), ("ant", (3, 4, 3.5, 9)))
    write(tmp_path, "b", ("cat", (2, 2, 5, 5)), hard=1)
    (tmp_path / "ImageSets/Main/train.txt").write_text("b  1\n\n", encoding="utf-8")
    found = read_voc(tmp_path)
    assert found.classes == ("ant", "cat")
    assert found.problems == ()
    first, second = found.items
    assert (first.image.name, first.width, first.height) == ("a.jpg", 20, 10)
    assert first.truth.boxes.tolist() == [
        [0, 0, 20, 10],
        [2, 3, 3.5, 9],
    ]  # pixels count from 1, the last one too
    assert first.truth.classes.tolist() == [1, 0]
    assert second.truth.ignored().tolist() == [True]
    assert found.listed == 2
    assert [item.image.stem for item in read_voc(tmp_path, "train").items] == ["b"]
    assert read_voc(tmp_path, classes=["dog", "cat", "ant"]).items[1].truth.classes.tolist() == [1]


def test_problems_are_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    write(tmp_path, "fine", ("cat", (1, 1, 5, 5)))
    write(tmp_path, "outside", ("cat", (-5, 2, 10, 30)), ("cat", (30, 2, 40, 5)), ("cat", (7, 2, 3, 5)))
    write(tmp_path, "zero", ("cat", (0, 0, 20, 10)))  # counts from 0: nothing to speak of
    write(tmp_path, "empty")
    write(tmp_path, "broken").write_text("<annotation><size>", encoding="utf-8")
    write(tmp_path, "nameless").write_text(
        "<annotation><size><width>9</width><height>9</height></size><object/></annotation>", encoding="utf-8"
    )
    write(tmp_path, "words", ("cat", (1, 1, 5, float("nan"))))
    write(tmp_path, "gone", ("cat", (1, 1, 5, 5)))
    (tmp_path / "JPEGImages/gone.jpg").unlink()
    names = ["fine", "outside", "zero", "empty", "broken", "nameless", "words", "gone", "missing"]
    (tmp_path / "ImageSets/Main/all.txt").write_text("\n".join(names), encoding="utf-8")
    found = read_voc(tmp_path, "all")
    assert [item.image.stem for item in found.items] == ["fine", "outside", "zero", "empty"]
    assert found.items[1].truth.boxes.tolist() == [[0, 1, 10, 10]]
    told = [(problem.file.stem, problem.what) for problem in found.problems]
    assert [file for file, _ in told] == [
        "outside",
        "outside",
        "outside",
        "empty",
        "broken",
        "nameless",
        "words",
        "gone",
        "missing",
    ]
    for (_, what), part in zip(
        told,
        [
            "partly outside the image; it is cut",
            "no area in the image",
            "no area in the image",
            "has no box; the image is kept",
            "cannot be read",
            "<object> has no bndbox/xmin",
            "nan",
            "no image in JPEGImages",
            "is missing; the image is left out",
        ],
        strict=True,
    ):
        assert part in what
    assert found.items[3].truth.boxes.shape == (0, 4)
    assert np.concatenate([item.truth.boxes for item in found.items]).shape == (3, 4)


def test_an_image_rotated_by_exif_is_reported(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    tag = image.Exif()
    tag[0x0112] = 6  # shown a quarter to the right
    write(tmp_path, "turned", ("cell", (1, 1, 5, 5)))
    image.new("RGB", (20, 10)).save(tmp_path / "JPEGImages" / "turned.jpg", exif=tag)
    write(tmp_path, "other", ("cell", (1, 1, 5, 5)), ("cell", (1, 1, 30, 30)), ("cell", (50, 1, 60, 5)))
    image.new("RGB", (20, 12)).save(tmp_path / "JPEGImages" / "other.jpg")
    write(tmp_path, "good", ("cell", (1, 1, 5, 5)))
    image.new("RGB", (20, 10)).save(tmp_path / "JPEGImages" / "good.jpg")
    (tmp_path / "ImageSets/Main/train.txt").write_text("turned\nother\ngood\n", encoding="utf-8")
    found = read_voc(tmp_path, "train")
    assert (len(found.items), found.listed) == (1, 3)
    pictures, damaged = load_detection_dataset(found, 32)
    assert damaged == ()
    assert [path.stem for path in pictures.paths] == ["good"]
    problems = found.problems
    assert len(problems) == 2  # boxes of a wrong size are not told one by one
    assert "turned (EXIF), as 10 × 20 pixels, and its boxes are for 20 × 10" in problems[0].what
    assert "it has 20 × 12 pixels, not 20 × 10" in problems[1].what


def test_files_of_other_tools(tmp_path: Path) -> None:
    path = write(tmp_path, "a", ("cat", (1, 1, 5, 5)))
    (tmp_path / "JPEGImages/a.jpg").rename(tmp_path / "JPEGImages/a.JPG")
    path.write_text(path.read_text(encoding="utf-8").replace(">0<", ">False<"), encoding="utf-8")
    strange = write(tmp_path, "b")
    strange.write_text('<?xml version="1.0" encoding="foo"?><annotation/>', encoding="utf-8")
    listed = tmp_path / "ImageSets/Main/train.txt"
    listed.write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    found = read_voc(tmp_path, "train")
    assert [item.image.name for item in found.items] == ["a.JPG"]
    assert found.items[0].truth.ignored().tolist() == [False]
    assert [(problem.file, "cannot be read" in problem.what) for problem in found.problems] == [
        (strange, True)
    ]
    listed.write_bytes(b"\xff\xfe")
    assert f"{listed} is not a text file" in error_of(lambda: read_voc(tmp_path, "train"))


def test_a_name_that_no_file_can_have_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "fine", ("cat", (1, 1, 5, 5)))
    (tmp_path / "ImageSets/Main/train.txt").write_text(f"{'a' * 5000}\nb\0c\nfine\n", encoding="utf-8")
    found = read_voc(tmp_path, "train")
    assert [item.image.stem for item in found.items] == ["fine"]
    assert len(found.problems) == 2
    assert all("cannot be read" in problem.what for problem in found.problems)
    lines: list[str] = []
    report_problems(found.problems, "", lines.append)
    assert max(map(len, lines)) <= 1000


def test_too_long_class_names_are_errors(tmp_path: Path) -> None:
    write(tmp_path, "long", ("c" * 100_000, (1, 1, 5, 5)))
    message = error_of(lambda: read_voc(tmp_path))
    assert "a name of 100,000 characters, expected at most 1000" in message
    assert len(message) < 1000


def test_unusable_folders_are_errors(tmp_path: Path) -> None:
    assert "no folder in VOC's layout: it needs Annotations" in error_of(lambda: read_voc(tmp_path))
    path = write(tmp_path, "a", ("cat", (1, 1, 5, 5)))
    assert "no split 'val'; possible: none" in error_of(lambda: read_voc(tmp_path, "val"))
    message = error_of(lambda: read_voc(tmp_path, classes=["dog"]))
    assert f"{path}: class 'cat' is not in the list: dog" in message
    assert "must differ" in error_of(lambda: read_voc(tmp_path, classes=["cat", "cat"]))
    write(tmp_path, "a")
    assert "no image of" in error_of(lambda: read_voc(tmp_path))
    path.write_text("", encoding="utf-8")
    assert "can be used; " in error_of(lambda: read_voc(tmp_path))


def test_bccd(tmp_path: Path) -> None:
    folder = os.environ.get("DSNET_DATA")
    if folder is None or not (Path(folder) / "bccd.zip").is_file():
        pytest.skip("DSNET_DATA has no bccd.zip")
    with zipfile.ZipFile(Path(folder) / "bccd.zip") as archive:
        archive.extractall(tmp_path)
    found = read_voc(tmp_path / "BCCD")
    assert found.classes == ("Platelets", "RBC", "WBC")
    assert len(found.items) == 364
    boxes = sum(len(item.truth.boxes) for item in found.items)
    left_out = sum("the box is left out" in problem.what for problem in found.problems)
    assert boxes + left_out == 4888
    parts = [len(read_voc(tmp_path / "BCCD", split).items) for split in ("train", "val", "test", "trainval")]
    assert parts[0] + parts[1] == parts[3]
    assert parts[2] + parts[3] == 364
