"""Parquet files and datasets of the Hub, in memory and decoded on demand."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import dsnet
from dsnet.data import load_dataset
from dsnet.data.decode import decode
from dsnet.data.lazy import LazyDataset
from dsnet.data.readers import parquet as parquet_module
from dsnet.data.readers.hub import read_hub
from dsnet.errors import DsnetError
from dsnet.training.api import load_data
from dsnet.training.config import DataConfig, TrainConfig
from tests.support import error_of
from tests.support.image_files import SIZE, picture, resized_then_cropped

# Said where there are fewer than two processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def write_parquet(path: Path, labels: list[int], *, metadata: bytes | None = None) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"bytes": picture(i, "WEBP"), "path": f"{i}.webp"} for i in labels]
    table = pa.table({"image": rows, "label": labels})
    parquet.write_table(table.replace_schema_metadata({"huggingface": metadata} if metadata else None), path)


@pytest.mark.parametrize("workers", [0, 2])
def test_parquet(tmp_path: Path, workers: int) -> None:
    write_parquet(tmp_path / "train-00000.parquet", [0, 3, 1])
    write_parquet(tmp_path / "train-00001.parquet", [2, 0])
    note = b'{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
    write_parquet(tmp_path / "validation.parquet", [1], metadata=note)
    kept = load_dataset(str(tmp_path), "train", size=SIZE)
    given = load_dataset(str(tmp_path), "train", size=SIZE, lazy=True)
    assert isinstance(given, LazyDataset)
    assert given.labels.tolist() == [0, 3, 1, 2, 0]
    assert given.classes == ("0", "1", "2", "3")
    assert given.items.name(4) == f"{tmp_path / 'train-00001.parquet'}, row 1"
    images, labels = next(replace(given, workers=workers).epoch(5))
    assert torch.equal(images, kept.images)
    assert torch.equal(labels, kept.labels)
    single = load_dataset(str(tmp_path / "validation.parquet"), "test", size=SIZE)
    assert (single.classes, single.labels.tolist()) == (("cat", "dog"), [1])
    assert len(load_dataset(str(tmp_path), "test", size=SIZE)) == 1


@pytest.mark.parametrize("lazy", [False, True])
def test_every_layout_is_resized_and_cropped(tmp_path: Path, lazy: bool) -> None:
    """ImageNet's usual 256 and 224 pixels, against Pillow."""
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [0, 1])
        for label in (0, 1):
            path = tmp_path / "files" / split / str(label) / "x.webp"
            path.parent.mkdir(parents=True)
            path.write_bytes(picture(label, "WEBP"))
    expected = [resized_then_cropped(picture(label, "WEBP"), 224, 256) for label in (0, 1)]
    meta = dsnet.create_model("ds_mbnet", device="meta")
    for name in (tmp_path, tmp_path / "files"):
        data = DataConfig(name=str(name), crop_ratio=0.875, lazy=lazy, workers=0)
        for source in load_data(TrainConfig(data=data), meta):
            assert source.ratio == 0.875
            assert np.array_equal(next(source.epoch(2))[0].numpy(), np.stack(expected))
    for wrong in (0.0, 1.01, math.nan, -1):
        assert "crop_ratio must lie above 0" in error_of(partial(DataConfig, crop_ratio=wrong))


def test_invalid_parquet_tables_are_errors(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x-train.parquet", [0])
    assert "not the test split" in error_of(lambda: load_dataset(str(tmp_path / "x-train.parquet"), "test"))
    assert "looked for train/ or train*.parquet" in error_of(lambda: load_dataset(str(tmp_path), "train"))
    write_parquet(tmp_path / "latest.parquet", [0])
    assert len(load_dataset(str(tmp_path / "latest.parquet"), "train", size=SIZE)) == 1
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    assert "cannot be read as Parquet" in error_of(
        lambda: load_dataset(str(tmp_path / "bad.parquet"), "train")
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_a_class_name_that_no_checkpoint_takes_is_refused_before_training(tmp_path: Path, lazy: bool) -> None:
    features = {"label": {"names": ["cat", "d" * 100_000]}}
    path = tmp_path / "train.parquet"
    write_parquet(path, [0, 1], metadata=json.dumps({"info": {"features": features}}).encode())
    message = error_of(lambda: load_dataset(str(path), "train", size=SIZE, lazy=lazy))
    assert "a name of 100,000 characters, expected at most 1000" in message
    assert len(message) < 1000


def test_the_copy_of_a_table_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    write_parquet(tmp_path / "t.parquet", [0, 1])
    given = load_dataset(str(tmp_path / "t.parquet"), "train", lazy=True)
    assert len(list((tmp_path / "copies").iterdir())) == 1
    part = given.subset(torch.tensor([1]))
    del given
    assert len(list((tmp_path / "copies").iterdir())) == 1
    assert next(part.epoch(1))[1].tolist() == [1]
    del part
    assert list((tmp_path / "copies").iterdir()) == []


def test_the_hub_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'dsnet-pytorch[datasets]'" in error_of(
        lambda: load_dataset("hf:uoft-cs/cifar10", "train")
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_hub_datasets(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def table(labels: list[int]) -> object:
        names = datasets.ClassLabel(names=["cat", "dog"])
        features = datasets.Features({"img": datasets.Image(), "fine_label": names})
        rows = [{"bytes": picture(i), "path": None} for i in range(len(labels))]
        return datasets.Dataset.from_dict({"img": rows, "fine_label": labels}, features=features)

    saved = tmp_path / "saved"
    splits = {"train": table([0, 1, 1]), "test": table([-1, -1]), "validation": table([1, 0])}
    datasets.DatasetDict(splits).save_to_disk(saved)
    files = tmp_path / "files"
    files.mkdir()
    splits["train"].to_parquet(files / "train-00000-of-00001.parquet")
    expected = torch.stack([decode(picture(i), SIZE)[0] for i in range(3)])
    for place in (saved, files):
        given = load_dataset(f"hf:{place}", "train", size=SIZE, lazy=True)
        assert isinstance(given, LazyDataset)
        assert (given.classes, given.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
        assert torch.equal(next(replace(given, workers=workers).epoch(3))[0], expected)
        assert torch.equal(load_dataset(f"hf:{place}", "train", size=SIZE).images, expected)
    assert read_hub(str(saved), "test").labels.tolist() == [1, 0]
    assert load_dataset(str(files), "train", size=SIZE).classes == ("cat", "dog")
    assert "no test split; it has train" in error_of(lambda: load_dataset(f"hf:{files}", "test"))
    splits["train"].rename_column("img", "photo").save_to_disk(tmp_path / "odd")
    assert "it has photo, fine_label" in error_of(lambda: load_dataset(f"hf:{tmp_path / 'odd'}", "train"))
    assert "cannot be loaded" in error_of(lambda: load_dataset(f"hf:{tmp_path / 'nowhere'}", "train"))


def write_bomb(path: Path, size: int, rows: int) -> None:
    """One image of zeros, which every row names: hundreds of bytes that stand for ``size * rows``."""
    import pyarrow as pa
    from pyarrow import parquet

    images = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([bytes(size)]))
    table = pa.table({"image": pa.StructArray.from_arrays([images], ["bytes"]), "label": [0] * rows})
    parquet.write_table(table, path, compression="zstd", store_schema=False)


@pytest.mark.parametrize(
    ("size", "rows", "limits", "told"),
    [
        (10_000, 200, {"MIN_BYTES": 100_000}, "unpacks to more than"),
        (10_000, 200, {"MIN_BYTES": 9000, "MAX_RATIO": 1}, "bytes in a file of"),
        (10, 5000, {"MIN_ROWS": 10}, "declares 5,000 rows"),
    ],
)
def test_a_parquet_bomb_is_refused(
    size: int, rows: int, limits: dict[str, int], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    path = tmp_path / "x.parquet"
    write_bomb(path, size, rows)
    assert path.stat().st_size < 1000
    assert len(load_dataset(str(path), "train", lazy=True)) == rows  # not more than any file may take
    for name, value in limits.items():
        monkeypatch.setattr(parquet_module, name, value)
    message = error_of(lambda: load_dataset(str(path), "train", lazy=True))
    assert message.startswith(str(path))
    assert told in message
    assert list(copies.iterdir()) == []


@pytest.mark.parametrize("field", [0, 5])  # rows of the file, rows of its row group
def test_a_parquet_file_with_other_rows_than_it_declares_is_refused(field: int, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_bomb(path, 10, 1000)
    whole = path.read_bytes()
    size = int.from_bytes(whole[-8:-4], "little")
    start = len(whole) - 8 - size
    declared, other = b"\xd0\x0f", b"\x94\x00"  # 1000 and 10, in Thrift's form, of two bytes
    positions = [i for i in range(start, len(whole)) if whole.startswith(declared, i)]
    at = positions[field]
    path.write_bytes(whole[:at] + other + whole[at + 2 :])
    message = error_of(lambda: load_dataset(str(path), "train", lazy=True))
    assert message.startswith(str(path))
    assert "rows, but a column has" in message


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "whole.parquet", [0, 1, 2])
    whole = (tmp_path / "whole.parquet").read_bytes()
    path, rng, messages = tmp_path / "x.parquet", np.random.default_rng(0), []
    for _ in range(60):
        bits = bytearray(whole)
        for at in rng.integers(len(bits), size=10):
            bits[at] = rng.integers(256)
        path.write_bytes(bytes(bits))
        try:
            load_dataset(str(path), "train", lazy=True)
        except DsnetError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(str(path) in message and len(message) < 1000 for message in messages)


def test_columns_of_other_types_are_errors(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "x.parquet"
    for columns, told in (
        ({"image": [[1, 2]], "label": [0]}, "expected bytes of image files"),
        ({"image": [b"x"], "label": ["cat"]}, "expected whole numbers"),
        ({"image": [b"x"], "label": [None]}, "must be a whole number, not None"),
    ):
        parquet.write_table(pa.table(columns), path)
        assert told in error_of(lambda: load_dataset(str(path), "train", lazy=True))
