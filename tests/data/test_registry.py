"""Datasets in their published layouts, on small generated files and, where they exist, real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import dsnet
from dsnet.data import (
    DatasetRequest,
    InMemoryDataset,
    list_datasets,
    load_dataset,
    register_dataset,
    registry,
)
from dsnet.data.decode import DecodeErrors
from dsnet.data.inspect import inspect_dataset
from dsnet.data.readers import cifar_idx as files
from dsnet.data.readers import public_datasets
from dsnet.errors import DsnetError
from dsnet.training.api import load_data
from dsnet.training.config import DataConfig, TrainConfig
from tests.support import error_of
from tests.support.image_files import write_cifar


def toy(count: int = 40, classes: int = 4) -> InMemoryDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return InMemoryDataset(
        name="toy", images=images, labels=torch.arange(count) % classes, classes=tuple("abcdefgh"[:classes])
    )


def test_digits_need_no_files() -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape[1:] == (3, 16, 16)
    assert train.classes == tuple("0123456789")
    assert train.images.float().std() > 50
    assert torch.equal(load_dataset("digits", "train").images, train.images)
    assert set(test.labels.tolist()) == set(range(10))


def test_cifar_in_its_canonical_layout(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 4, 3, 32, 32), dtype=np.uint8)
    for i in range(5):
        write_cifar(tmp_path / f"cifar-10-batches-py/data_batch_{i + 1}", images[i], labels=[i, 1, 2, 9])
    write_cifar(tmp_path / "cifar-10-batches-py/test_batch", images[5], labels=[0, 1, 2, 3])
    train = load_dataset("cifar10", "train", root=tmp_path)
    assert np.array_equal(train.images.numpy(), images[:5].reshape(20, 3, 32, 32))
    assert train.labels.tolist()[::4] == [0, 1, 2, 3, 4]
    assert load_dataset("cifar10", "test", root=tmp_path).labels.tolist() == [0, 1, 2, 3]
    write_cifar(
        tmp_path / "cifar-100-python/test", images[0], fine_labels=[99, 1, 2, 3], coarse_labels=[0, 0, 0, 0]
    )
    assert load_dataset("cifar100", "test", root=tmp_path).labels.tolist() == [99, 1, 2, 3]


def test_a_cifar_file_cannot_run_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.system, ("echo ran",)

    path = tmp_path / "cifar-10-batches-py/test_batch"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps({b"data": Evil()}))
    assert "not a CIFAR file" in error_of(lambda: load_dataset("cifar10", "test", root=tmp_path))


def test_fashion_mnist_is_padded_to_32(tmp_path: Path) -> None:
    images = np.arange(2 * 28 * 28, dtype=np.int64).reshape(2, 28, 28).astype(np.uint8)
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    header = b"\0\0\x08\x03" + struct.pack(">3I", 2, 28, 28)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 2) + bytes([7, 2]))
    test = load_dataset("fashion_mnist", "test", root=tmp_path)
    assert test.images.shape == (2, 3, 32, 32)
    assert np.array_equal(test.images[1, 2, 2:30, 2:30].numpy(), images[1])
    assert test.images[:, :, :2].sum() == 0
    assert test.labels.tolist() == [7, 2]
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 5) + bytes([7, 2]))
    assert "cut short" in error_of(lambda: load_dataset("fashion_mnist", "test", root=tmp_path))


def test_the_sample_of_fashion_mnist_comes_with_the_package() -> None:
    train, test = (load_dataset("fashion_mnist_sample", split) for split in ("train", "test"))
    assert train.images.shape == test.images.shape == (2000, 3, 32, 32)
    assert not torch.equal(train.images, test.images)
    assert min(np.bincount(train.labels).min(), np.bincount(test.labels).min()) > 150
    folder = Path(dsnet.__file__).parent / "data" / "samples" / "fashion_mnist"
    told = (folder / "README.md").read_text(encoding="utf-8")
    for file in folder.glob("*.gz"):
        assert f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" in told
    assert "Zalando" in (folder / "LICENSE").read_text(encoding="utf-8")


def test_a_missing_or_damaged_sample_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_datasets, "SAMPLES", tmp_path)
    message = error_of(lambda: load_dataset("fashion_mnist_sample", "test"))
    assert "a file of this package (install it again) is not there" in message
    path = tmp_path / "fashion_mnist" / "images-idx3-ubyte.gz"
    path.parent.mkdir()
    path.write_bytes(b"nothing")
    message = error_of(lambda: load_dataset("fashion_mnist_sample", "test"))
    assert f"{path} is damaged" in message


def idx(*shape: int, body: bytes = b"") -> bytes:
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + body


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (idx(2, 28, 28, body=bytes(2 * 28 * 28 + 1)), "has more"),
        (idx(2, 28, 28, body=bytes(2 * 28 * 28 - 1)), "cut short at 1567"),
        (idx(1000, 28, 28), "more than the 100,000"),
        (idx(2**32 - 1, 2**32 - 1, 2**32 - 1), "more than the 100,000"),
        (idx(2, 29, 29, body=bytes(2 * 29 * 29)), "must be 28 × 28 pixels, not 29 × 29"),
        (idx(56, 28, body=bytes(56 * 28)), "with 3 dimensions"),
        (idx(2, 28, 28)[:9], "unpack requires"),
        (b"", "with 3 dimensions"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_damaged_idx_file_is_named(
    content: bytes, told: str, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100_000)
    path = tmp_path / ("t10k-images-idx3-ubyte" + ".gz" * zipped)
    path.write_bytes(gzip.compress(content) if zipped else content)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(2, body=bytes(2)))
    message = error_of(lambda: load_dataset("fashion_mnist", "test", root=tmp_path))
    assert told in message
    assert str(tmp_path) in message


def test_damaged_archives_and_zip_bombs_are_errors_and_use_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = gzip.compress(idx(20, 28, 28, body=np.random.default_rng(0).bytes(20 * 28 * 28)))
    for damaged in (
        whole[:-9],
        whole[:5],
        b"no gzip",
        whole[:200] + b"\xff" * 99 + whole[299:],
        whole + b"x",
    ):
        path.write_bytes(damaged)
        assert str(path) in error_of(lambda: load_dataset("fashion_mnist", "test", root=tmp_path))
    path.write_bytes(gzip.compress(idx(2, 28, 28, body=bytes(10**7))))  # declares 1,568 bytes
    read, most = gzip.GzipFile.read, []

    def counted(file: gzip.GzipFile, size: int | None = -1) -> bytes:
        got = read(file, size)
        most.append(len(got))
        return got

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    assert "it has more" in error_of(lambda: load_dataset("fashion_mnist", "test", root=tmp_path))
    assert max(most) == 1569
    most.clear()
    path.write_bytes(gzip.compress(idx(100_000, 28, 28, body=bytes(10**6))))  # 78 MB in some 1,000 bytes
    assert "declares 78,400,000 bytes in a file of" in error_of(
        lambda: load_dataset("fashion_mnist", "test", root=tmp_path)
    )
    assert max(most) < 20


@pytest.mark.parametrize(
    "content",
    [
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, "a"]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": np.zeros(2)},
        {b"data": [[0] * 3072] * 2, b"labels": [1, 2]},
        {b"data": np.broadcast_to(np.zeros(1, np.uint8), (2, 3072)).view(), b"labels": None},
        [1, 2],
        None,
    ],
)
def test_a_cifar_file_with_other_contents_is_named(content: object, tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(content))
    assert str(path) in error_of(lambda: load_dataset("cifar10", "test", root=tmp_path))


def bomb(codes: bytes) -> bytes:
    """A pickle of the protocol that has all codes."""
    return b"\x80\x05" + codes + b"."


HEX = b"c_codecs\nencode\n", b"X\x03\0\0\0hex\x86R"  # what comes between the two becomes twice as long


@pytest.mark.parametrize(
    "content",
    [
        bomb(b"Nr" + struct.pack("<I", 2**26)),  # remembered under a number: a table of so many
        bomb(b"\x96" + struct.pack("<Q", 2**30)),  # bytes that can be changed, none of them there
        bomb(b"cnumpy\nndarray\nJ" + struct.pack("<i", 2**27) + b"\x85cnumpy\ndtype\nX\1\0\0\0O\x85R\x86R"),
        bomb(HEX[0] * 24 + b"C\x40" + bytes(64) + HEX[1] * 24),
    ],
)
def test_a_cifar_file_cannot_allocate_more_memory_than_its_size(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir()
    path.write_bytes(content)
    tracemalloc.start()
    try:
        assert str(path) in error_of(lambda: load_dataset("cifar10", "test", root=tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_any_damage_to_a_cifar_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    write_cifar(path, np.zeros((1, 3, 32, 32), np.uint8), labels=[3])
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    head = len(whole) - 3072
    damaged = [whole[:length] for length in range(0, len(whole), 97)]
    for _ in range(300):
        bits = bytearray(whole)
        at = (
            int(rng.integers(head // 2))
            if rng.random() < 0.5
            else len(whole) - 1 - int(rng.integers(head // 2))
        )
        bits[at] = int(rng.integers(256))
        damaged.append(bytes(bits))
    messages = []
    for content in damaged:
        path.write_bytes(content)
        try:
            load_dataset("cifar10", "test", root=tmp_path)
        except DsnetError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message or "labels" in message for message in messages)


def encoded(colour: int, size: tuple[int, int] = (20, 30), kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 255 - colour)).save(out, kind)
    return out.getvalue()


def test_class_folders_and_damaged_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"{i}.png").write_bytes(encoded(100 * label + i))
            (folder / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "dog" / "1.png").write_bytes(encoded(5)[:40])
    with pytest.warns(UserWarning, match=r"skipped .*dog.1\.png"):
        train = load_dataset(str(tmp_path), "train", size=16)
    assert train.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert train.images.shape == (5, 3, 16, 16)
    assert train.images[:, 0, 8, 8].tolist() == [0, 1, 2, 100, 102]
    assert len(load_dataset(str(tmp_path), "test", size=16)) == 6


def test_too_many_decode_errors_are_an_error() -> None:
    damage = DecodeErrors(limit=1)
    with pytest.warns(UserWarning, match="skipped a: broken"):
        damage.add("a", "broken")
    damage.add("a", "broken")  # known already
    message = error_of(lambda: damage.add("b", "broken"))
    assert "more than 1 images" in message
    assert "a, b" in message


def test_parquet_in_the_layout_of_hugging_face(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"bytes": encoded(i, (40, 24), "WEBP"), "path": f"{i}.webp"} for i in range(3)]
    table = pa.table({"image": rows, "label": [0, 9, 4]})
    parquet.write_table(table, tmp_path / "imagenette128-val.parquet")
    val = load_dataset("imagenette", "test", root=tmp_path, size=24)
    assert val.images.shape == (3, 3, 24, 24)
    assert val.labels.tolist() == [0, 9, 4]
    assert val.classes[9] == "parachute"
    parquet.write_table(table.drop_columns("label"), tmp_path / "imagenette128-train.parquet")
    assert "no column label; it has image" in error_of(
        lambda: load_dataset("imagenette", "train", root=tmp_path)
    )


def test_real_imagenette() -> None:
    root = os.environ.get("DSNET_DATA")
    if root is None or not (Path(root) / "imagenette128-val.parquet").exists():
        pytest.skip("needs Imagenette: set DSNET_DATA to a folder with imagenette128-val.parquet")
    val = load_dataset("imagenette", "test")
    assert len(val) == 3925
    assert val.images.shape[1:] == (3, 128, 128)
    assert val.labels.bincount(minlength=10).min() > 300


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 60), st.integers(1, 5), st.floats(0.05, 0.95), st.integers(0, 5))
def test_held_out_splits_are_stratified(count: int, classes: int, share: float, seed: int) -> None:
    whole = toy(count, classes)
    rest, held = whole.hold_out(share, seed=seed)
    assert len(rest) + len(held) == count
    for label in range(classes):
        members = int((whole.labels == label).sum())
        assert int((held.labels == label).sum()) == round(share * members)
    again, _ = whole.hold_out(share, seed=seed)
    assert torch.equal(again.images, rest.images)
    both = torch.cat([rest.images, held.images]).flatten(1).double().sum(1).sort().values
    assert torch.equal(both, whole.images.flatten(1).double().sum(1).sort().values)


def test_epochs_and_statistics() -> None:
    whole = toy()
    batches = list(whole.epoch(12, torch.Generator().manual_seed(3)))
    assert [len(labels) for _, labels in batches] == [12, 12, 12]
    again = list(whole.epoch(12, torch.Generator().manual_seed(3)))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))
    in_order = list(whole.epoch(12))
    assert torch.equal(torch.cat([labels for _, labels in in_order]), whole.labels)
    mean, std = whole.statistics()
    values = whole.images.double().transpose(0, 1).flatten(1) / 255
    assert mean == pytest.approx(values.mean(1).tolist())
    assert std == pytest.approx(values.std(1, correction=0).tolist())


def test_a_registered_reader_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_READERS", dict(registry._READERS))

    @register_dataset("toy")
    def read(request: DatasetRequest) -> InMemoryDataset:
        return replace(toy(20 if request.split == "train" else 8), resize=request.size)

    assert "toy" in list_datasets()
    assert [len(load_dataset("toy", split, size=16)) for split in ("train", "test")] == [20, 8]
    assert inspect_dataset("toy").counts == (5, 5, 5, 5)
    config = TrainConfig(model="ds_mbnet_tiny", data=DataConfig(name="toy"))
    train, test = load_data(config, dsnet.create_model("ds_mbnet_tiny", num_classes=4))
    assert (train.name, len(test)) == ("toy", 8)
    assert "'toy' is registered already" in error_of(lambda: register_dataset("toy")(read))
    message = error_of(lambda: load_dataset("unknown", "train"))
    assert "imagenette, toy" in message


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSNET_DATA", raising=False)
    assert "DSNET_DATA" in error_of(lambda: load_dataset("cifar10", "train"))
    assert "cifar-10-batches-py" in error_of(lambda: load_dataset("cifar10", "train", root=tmp_path))
    assert "cifar10, cifar100, digits" in error_of(lambda: load_dataset("mnist", "train"))
    assert "train, test" in error_of(lambda: load_dataset("digits", "val"))
    assert "one folder a class" in error_of(lambda: _empty(tmp_path))
    assert "3 labels" in error_of(
        lambda: InMemoryDataset(name="x", images=toy(4).images, labels=torch.zeros(3), classes=("a",))
    )
    assert "0 to 3 do not fit 2" in error_of(
        lambda: InMemoryDataset(name="x", images=toy(4).images, labels=torch.arange(4), classes=("a", "b"))
    )


def _empty(folder: Path) -> InMemoryDataset:
    (folder / "train").mkdir()
    return load_dataset(str(folder), "train")
