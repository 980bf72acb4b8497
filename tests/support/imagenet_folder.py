"""What tests of several files read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.image_files import picture


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet's layout: 12 + 6 images of two classes."""
    base = tmp_path_factory.mktemp("imagenet")
    for split, each in (("train", 6), ("val", 3)):
        for label, name in enumerate(("n01440764", "n02102040")):
            folder = base / "imagenet" / split / name
            folder.mkdir(parents=True)
            for i in range(each):
                (folder / f"{name}_{i}.JPEG").write_bytes(picture(100 * label + i, "JPEG"))
    return base
