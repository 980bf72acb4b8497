"""Datasets decoded on demand give the same batches as those in memory, for any workers and batches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dsnet.data import InMemoryDataset, load_dataset
from dsnet.data.dataset import Crops
from dsnet.data.decode import DecodeErrors, crop_box, decode, decode_all
from dsnet.data.lazy import LazyDataset
from dsnet.data.readers.folder import ImagePaths
from tests.support import error_of
from tests.support.image_files import SIZE, lazy, picture

# Said where there are fewer than two processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def memory(root: Path) -> InMemoryDataset:
    found = load_dataset("imagenet", "train", root=root, size=SIZE)
    assert isinstance(found, InMemoryDataset)
    return found


def order(*batches: list[int]) -> list[Tensor]:
    return [torch.tensor(batch) for batch in batches]


def gathered(batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images, 1), torch.cat(labels)


@pytest.mark.parametrize("workers", [0, 2])
def test_lazy_and_in_memory_datasets_give_the_same_batches(root: Path, workers: int) -> None:
    before = torch.get_rng_state()
    given, kept = lazy(root, workers=workers), memory(root)
    assert (len(given), given.classes) == (len(kept), kept.classes)
    assert torch.equal(given.labels, kept.labels)
    wanted = order([11, 0, 3], [5], [2, 2, 7, 1])
    pairs = list(zip(given.batches(wanted), kept.batches(wanted), strict=True))
    assert [tuple(a.shape) for (a, _), _ in pairs] == [(1, n, 3, SIZE, SIZE) for n in (3, 1, 4)]
    for (images, labels), (other, expected) in pairs:
        assert torch.equal(images, other)
        assert torch.equal(labels, expected)
    epochs = [list(s.epoch(5, torch.Generator().manual_seed(1))) for s in (given, kept)]
    assert [len(labels) for _, labels in epochs[0]] == [5, 5]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*epochs, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(given.batches([])) == []


def test_crops_do_not_depend_on_workers_or_batches(root: Path) -> None:
    crops = Crops(views=3, area=(0.2, 0.9), seed=5)
    whole = order([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11])
    images, labels = gathered(lazy(root).batches(whole, crops=crops))
    assert images.shape == (3, 12, 3, SIZE, SIZE)
    with_workers, same = gathered(lazy(root, workers=2).batches(whole, crops=crops))
    assert torch.equal(with_workers, images)
    assert torch.equal(same, labels)
    tail, _ = gathered(lazy(root).batches(whole[1:], crops=crops))
    assert torch.equal(tail, images[:, 4:])
    mixed = order([7], [11, 0, 7])
    assert torch.equal(gathered(lazy(root).batches(mixed, crops=crops))[0], images[:, [7, 11, 0, 7]])
    part = lazy(root).subset(torch.tensor([9, 2]))
    assert torch.equal(gathered(part.batches(order([0, 1]), crops=crops))[0], images[:, [9, 2]])
    fewer, _ = gathered(lazy(root).batches(whole, crops=replace(crops, views=2)))
    assert torch.equal(fewer, images[:2])
    other, _ = gathered(lazy(root).batches(whole, crops=replace(crops, seed=6)))
    assert not any(torch.equal(a, b) for a, b in zip(other.flatten(0, 1), images.flatten(0, 1), strict=True))
    assert not any(torch.equal(images[0, i], images[1, i]) for i in range(12))


def test_crops_come_from_the_original_image() -> None:
    data = picture(3)
    with Image.open(io.BytesIO(data)) as opened:
        original = opened.convert("RGB")
    box = crop_box(*original.size, (0.1, 0.5), np.random.default_rng((4, 9)))
    expected = np.array(original.resize((SIZE, SIZE), Image.Resampling.BICUBIC, box=box))
    views = decode(data, SIZE, crops=Crops(area=(0.1, 0.5), seed=4), index=9)
    assert np.array_equal(views[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (900, 30), (30, 900), (1, 1), (2, 3)])
def test_crop_boxes_have_the_requested_area_and_aspect(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    width, height = shape
    for _ in range(200):
        left, top, right, bottom = crop_box(width, height, (0.25, 0.75), rng)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        if min(shape) >= 200:
            assert 0.24 < (right - left) * (bottom - top) / (width * height) < 0.76
        if min(shape) >= 30:
            assert 0.7 < (right - left) / (bottom - top) < 1.4
    # No crop of 900 × 30 has a quarter of it at such an aspect: the largest one at the centre is left.
    assert crop_box(900, 30, (0.25, 0.75), rng) == (430, 0, 470, 30)
    assert crop_box(30, 900, (0.25, 0.75), rng) == (0, 430, 30, 470)


def test_a_ratio_crops_the_center(root: Path) -> None:
    data = picture(0)  # 40 × 40
    whole, inner = decode(data, 32, ratio=1.0), decode(data, 32, ratio=0.8)
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(inner[0].permute(1, 2, 0).numpy(), np.array(opened.convert("RGB"))[4:36, 4:36])
    assert not torch.equal(whole, inner)
    given = load_dataset("imagenet", "test", root=root, size=SIZE, ratio=0.5, lazy=True)
    kept = load_dataset("imagenet", "test", root=root, size=SIZE, ratio=0.5)
    assert torch.equal(next(given.epoch(6))[0], next(kept.epoch(6))[0])


@pytest.fixture
def damaged(tmp_path: Path) -> LazyDataset:
    """Eight images of four classes; 1, 2 and 7 cannot be read."""
    for i in range(8):
        data = picture(i)
        (tmp_path / f"{i}.png").write_bytes({1: b"", 2: b"nonsense", 7: data[:60]}.get(i, data))
    items = ImagePaths(tmp_path, [f"{i}.png" for i in range(8)])
    return LazyDataset(
        name="x", items=items, labels=torch.arange(8) // 2, classes=tuple("abcd"), size=SIZE, workers=0
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_an_undecodable_image_is_replaced_by_the_next_good_one(damaged: LazyDataset, workers: int) -> None:
    tried = replace(damaged, workers=workers)
    with pytest.warns(UserWarning, match="skipped") as told:
        (first, labels), (second, others) = tried.batches(order([0, 1, 2, 3], [5, 7]), crops=Crops(views=2))
    assert sorted(Path(str(w.message).split(":")[0]).name for w in told) == ["1.png", "2.png", "7.png"]
    assert labels.tolist() == [0, 1, 1, 1]
    assert others.tolist() == [2, 2]
    assert first.shape[:2] == (2, 4)
    assert torch.equal(first[:, 1], first[:, 3])
    assert torch.equal(first[:, 2], first[:, 3])
    assert torch.equal(second[:, 1], second[:, 0])
    list(tried.subset(torch.arange(4)).batches(order([1, 0])))  # not reported again
    assert len(tried.decode_errors.reasons) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_undecodable_images_are_left_out_without_full(damaged: LazyDataset, workers: int) -> None:
    tried = replace(damaged, workers=workers, decode_errors=DecodeErrors())
    with pytest.warns(UserWarning, match="skipped"):
        (whole,) = list(tried.batches([torch.arange(len(tried))]))
    (counted,) = list(tried.batches([torch.arange(len(tried))], full=False))
    lost = len(tried) - len(counted[1])
    assert lost == len(tried.decode_errors.reasons) > 0
    assert len(whole[1]) == len(tried)
    assert sum(len(labels) for _, labels in tried.epoch(4)) == len(tried) - lost


def test_too_many_decode_errors_stop_a_run(damaged: LazyDataset) -> None:
    tried = replace(damaged, decode_errors=DecodeErrors(limit=2))
    with pytest.warns(UserWarning, match=r"[12]\.png"):
        message = error_of(lambda: list(tried.batches(order([0, 1, 2, 3], [4, 5, 6, 7]))))
    assert "more than 2 images" in message
    assert all(f"{i}.png" in message for i in (1, 2, 7))
    with pytest.warns(UserWarning, match="no image that Pillow can read"):
        message = error_of(lambda: list(replace(damaged, decode_errors=DecodeErrors()).batches(order([1]))))
    assert "none of the 1 images" in message
    assert "1.png" in message
    with pytest.warns(UserWarning, match="skipped"):
        images, at = decode_all(damaged.items, SIZE)
    assert at.tolist() == [0, 3, 4, 5, 6]
    assert torch.equal(images[1], decode(damaged.items.source(3), SIZE)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_on_the_device(damaged: LazyDataset, workers: int) -> None:
    there = replace(damaged, workers=workers).to("cuda")
    wanted, crops = order([0, 1, 3], [5, 6, 4]), Crops(views=2)
    with pytest.warns(UserWarning, match=r"1\.png"):
        pairs = list(
            zip(there.batches(wanted, crops=crops), damaged.batches(wanted, crops=crops), strict=True)
        )
    for (images, labels), (expected, others) in pairs:
        assert images.device.type == labels.device.type == "cuda"
        assert torch.equal(images.cpu(), expected)
        assert torch.equal(labels.cpu(), others)


def test_subsets_and_held_out_splits(root: Path) -> None:
    given, kept = lazy(root), memory(root)
    for ours, theirs in zip(given.hold_out(0.3, seed=2), kept.hold_out(0.3, seed=2), strict=True):
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(next(ours.epoch(99))[0], theirs.images)
    twice = given.subset(torch.tensor([8, 3, 5])).subset(torch.tensor([2, 0]))
    assert torch.equal(next(twice.epoch(99))[0], kept.images[[5, 8]])
    assert "no indices 0 to 12" in error_of(lambda: given.subset(torch.tensor([0, 12])))


def test_statistics_come_from_a_sample(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = memory(root).statistics()
    assert lazy(root).statistics() == exact
    monkeypatch.setattr("dsnet.data.lazy.STATISTICS_SAMPLE", 6)
    for ours, theirs in zip(lazy(root).statistics(), exact, strict=True):
        assert ours != theirs
        assert ours == pytest.approx(theirs, abs=0.1)


def test_only_lazy_datasets_crop(root: Path) -> None:
    assert lazy(root).crops_in_workers
    assert not memory(root).crops_in_workers
    assert "in memory" in error_of(lambda: memory(root).batches(order([0]), crops=Crops()))


def test_bad_settings(root: Path) -> None:
    given = lazy(root)
    assert "workers must be at least 0" in error_of(lambda: replace(given, workers=-1))
    assert "prefetch must be at least 1" in error_of(lambda: replace(given, prefetch=0))
    assert "at most 1, not 1.5" in error_of(lambda: replace(given, ratio=1.5))
    assert "size must be at least 1" in error_of(lambda: replace(given, size=0))
    assert "12 images but 2 labels" in error_of(lambda: replace(given, labels=torch.arange(2)))
    assert "at least 1, not 0" in error_of(lambda: Crops(views=0))
    assert "0 < low <= high <= 1" in error_of(lambda: Crops(area=(0.5, 0.2)))
    assert "seed" in error_of(lambda: Crops(seed=-1))
    assert "ratio" in error_of(lambda: load_dataset("imagenet", "train", root=root, ratio=0))
    assert "at least 1 image" in error_of(lambda: list(given.epoch(0)))


def test_large_datasets_are_lazy_by_default(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsnet.data.registry.MAX_IN_MEMORY_BYTES", 12 * 3 * SIZE * SIZE)
    assert isinstance(load_dataset("imagenet", "train", root=root, size=SIZE), InMemoryDataset)
    assert isinstance(load_dataset("imagenet", "train", root=root, size=SIZE + 1), LazyDataset)
    assert isinstance(
        load_dataset("imagenet", "train", root=root, size=SIZE + 1, lazy=False), InMemoryDataset
    )
    assert isinstance(load_dataset("digits", "test", lazy=True), InMemoryDataset)


def test_imagenet_in_its_layouts(root: Path, tmp_path: Path) -> None:
    test = load_dataset("imagenet", "test", root=root, lazy=True)
    assert isinstance(test, LazyDataset)
    assert (len(test), test.size, test.classes) == (6, 224, ("n01440764", "n02102040"))
    assert len(load_dataset("imagenet", "test", root=root / "imagenet", lazy=True)) == 6
    (tmp_path / "ILSVRC2012").symlink_to(root / "imagenet", target_is_directory=True)
    assert len(load_dataset("imagenet", "test", root=tmp_path, lazy=True)) == 6
    assert len(load_dataset(str(root / "imagenet"), "test", lazy=True)) == 6
    assert "ILSVRC2012" in error_of(lambda: load_dataset("imagenet", "train", root=tmp_path / "nowhere"))
