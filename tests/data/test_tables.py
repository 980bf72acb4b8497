"""Parquet files and sets of the hub, in memory and decoded on demand."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsnet.data import load
from dsnet.data.decode import decode
from dsnet.data.hub import list_hub
from dsnet.data.lazy import LazySet
from tests.data.pictures import SIZE, picture
from tests.support import error_of

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
    kept = load(str(tmp_path), "train", size=SIZE)
    given = load(str(tmp_path), "train", size=SIZE, lazy=True)
    assert isinstance(given, LazySet)
    assert given.labels.tolist() == [0, 3, 1, 2, 0]
    assert given.classes == ("0", "1", "2", "3")
    assert given.items.name(4) == f"{tmp_path / 'train-00001.parquet'}, row 1"
    images, labels = next(replace(given, workers=workers).epoch(5))
    assert torch.equal(images, kept.images)
    assert torch.equal(labels, kept.labels)
    single = load(str(tmp_path / "validation.parquet"), "test", size=SIZE)
    assert (single.classes, single.labels.tolist()) == (("cat", "dog"), [1])
    assert len(load(str(tmp_path), "test", size=SIZE)) == 1


def test_parquet_that_does_not_fit(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x-train.parquet", [0])
    assert "not the test split" in error_of(lambda: load(str(tmp_path / "x-train.parquet"), "test"))
    assert "looked for train/ or train*.parquet" in error_of(lambda: load(str(tmp_path), "train"))
    write_parquet(tmp_path / "latest.parquet", [0])
    assert len(load(str(tmp_path / "latest.parquet"), "train", size=SIZE)) == 1
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    assert "cannot be read as Parquet" in error_of(lambda: load(str(tmp_path / "bad.parquet"), "train"))


def test_the_copy_of_a_table_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    write_parquet(tmp_path / "t.parquet", [0, 1])
    given = load(str(tmp_path / "t.parquet"), "train", lazy=True)
    assert len(list((tmp_path / "copies").iterdir())) == 1
    part = given.take(torch.tensor([1]))
    del given
    assert len(list((tmp_path / "copies").iterdir())) == 1
    assert next(part.epoch(1))[1].tolist() == [1]
    del part
    assert list((tmp_path / "copies").iterdir()) == []


def test_the_hub_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'dsnet[datasets]'" in error_of(lambda: load("hf:uoft-cs/cifar10", "train"))


@pytest.mark.parametrize("workers", [0, 2])
def test_hub_sets(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        given = load(f"hf:{place}", "train", size=SIZE, lazy=True)
        assert isinstance(given, LazySet)
        assert (given.classes, given.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
        assert torch.equal(next(replace(given, workers=workers).epoch(3))[0], expected)
        assert torch.equal(load(f"hf:{place}", "train", size=SIZE).images, expected)
    assert list_hub(str(saved), "test").labels.tolist() == [1, 0]
    assert load(str(files), "train", size=SIZE).classes == ("cat", "dog")
    assert "no test split; it has train" in error_of(lambda: load(f"hf:{files}", "test"))
    splits["train"].rename_column("img", "photo").save_to_disk(tmp_path / "odd")
    assert "it has photo, fine_label" in error_of(lambda: load(f"hf:{tmp_path / 'odd'}", "train"))
    assert "cannot be loaded" in error_of(lambda: load(f"hf:{tmp_path / 'nowhere'}", "train"))
