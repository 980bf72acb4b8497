"""Small datasets at another size: batches are resized, the stored images are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dsnet.data import InMemoryDataset, load_dataset
from tests.support import error_of
from tests.support.image_files import write_cifar


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten images in the layout of CIFAR-10."""
    images = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
    write_cifar(tmp_path / "cifar-10-batches-py/test_batch", images, labels=[0, 1, 2, 3, 4] * 2)
    return tmp_path


def cifar(root: Path, size: int | None) -> InMemoryDataset:
    found = load_dataset("cifar10", "test", root=root, size=size)
    assert isinstance(found, InMemoryDataset)
    return found


def by_pillow(images: Tensor, size: int) -> Tensor:
    made = [
        Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BILINEAR)
        for image in images
    ]
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in made])


@pytest.mark.parametrize("size", [20, 48, 128])
def test_batches_are_resized_and_images_are_not(root: Path, size: int) -> None:
    stored, given = cifar(root, None), cifar(root, size)
    assert (stored.size, given.size) == (32, size)
    assert torch.equal(given.images, stored.images)
    assert given.statistics() == stored.statistics()
    order = [torch.tensor([3, 1, 4]), torch.tensor([9])]
    for at, (images, labels) in zip(order, given.batches(order), strict=True):
        some = stored.images[at]
        exact = F.interpolate(some.float(), (size, size), mode="bilinear", antialias=size < 32).round()
        assert images.dtype == torch.uint8
        assert torch.equal(images, exact.to(torch.uint8)[None])
        # Pillow rounds after each of its two passes, so it may differ by a level.
        assert (images[0].int() - by_pillow(some, size).int()).abs().max() <= 1
        assert torch.equal(labels, stored.labels[at])


def test_epochs_are_resized(root: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for images, labels in cifar(root, 48).epoch(4, generator):
        assert (images.shape, len(labels)) == ((4, 3, 48, 48), 4)
    ((images, _),) = cifar(root, 48).epoch(10)
    exact = F.interpolate(cifar(root, None).images.float(), (48, 48), mode="bilinear").round()
    assert torch.equal(images, exact.to(torch.uint8))


@pytest.mark.parametrize("size", [None, 32])
def test_bytes_are_unchanged_at_the_stored_size(root: Path, size: int | None) -> None:
    given = cifar(root, size)
    ((images, _),) = given.epoch(10)
    assert torch.equal(images, given.images)
    assert given.size == 32


def test_subsets_keep_the_size(root: Path) -> None:
    given = cifar(root, 48)
    rest, held = given.hold_out(0.5)
    for part in (rest, held, given.subset(torch.tensor([2, 7])), given.to("cpu")):
        assert (part.size, part.images.shape[-1]) == (48, 32)
        ((images, _),) = part.epoch(len(part))
        assert images.shape == (len(part), 3, 48, 48)


def test_the_default_size_does_not_apply_to_small_datasets(root: Path) -> None:
    assert load_dataset("cifar10", "test", root=root, default_size=64).size == 32
    assert load_dataset("cifar10", "test", root=root, default_size=64, size=48).size == 48
    assert "at least 1, not 0" in error_of(lambda: cifar(root, 0))
    assert "at least 1, not 0" in error_of(lambda: load_dataset("digits", "test", default_size=0))
    bytes_ = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    labels = torch.zeros(1, dtype=torch.long)
    assert "at least 1, not -1" in error_of(
        lambda: InMemoryDataset(name="x", images=bytes_, labels=labels, classes=("a",), resize=-1)
    )


@pytest.mark.parametrize("split", ["train", "test"])
def test_digits_by_class(split: str) -> None:
    """Both parts together are the split of all digits, each with its own names and labels from 0."""
    whole, seen, unseen = (load_dataset(name, split) for name in ("digits", "digits_0_to_6", "digits_7_to_9"))
    assert isinstance(whole, InMemoryDataset)
    assert (seen.name, seen.classes) == ("digits_0_to_6", tuple("0123456"))
    assert (unseen.name, unseen.classes) == ("digits_7_to_9", tuple("789"))
    assert len(seen) + len(unseen) == len(whole)
    for part, low, high in ((seen, 0, 6), (unseen, 7, 9)):
        assert isinstance(part, InMemoryDataset)
        members = [i for i, label in enumerate(whole.labels.tolist()) if low <= label <= high]
        assert torch.equal(part.images, whole.images[members])
        named = [part.classes[label] for label in part.labels.tolist()]
        assert named == [str(label) for label in whole.labels[members].tolist()]
    assert load_dataset("digits_7_to_9", split, size=24).size == 24
