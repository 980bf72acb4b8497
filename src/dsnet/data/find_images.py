"""Find image files by name, folder or pattern."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from dsnet.data.readers.folder import SUFFIXES, is_image_file
from dsnet.errors import DsnetError, shorten

__all__ = ["find_images"]


def find_images(paths: Iterable[str | Path]) -> list[str]:
    """Expand names of files, folders and patterns (``photos/**/*.jpg``) to image files.

    Files are returned in the order given, each once. Named files are accepted whatever their suffix. In
    folders (recursively) and patterns, files with the suffix of an image that are not hidden are taken,
    sorted.

    Raises:
        DsnetError: A name does not exist, or has no images.
    """
    files: dict[str, str] = {}  # by absolute path
    for name in (os.fspath(path) for path in paths):
        if os.path.isdir(name):
            images, problem = _in_folder(name), f"{name} has no images in it"
        elif os.path.exists(name):  # even if its name looks like a pattern
            images, problem = [name], ""
        elif glob.has_magic(name):
            images, problem = _matching(name), f"no image matches {shorten(name, 500)}"
        else:
            raise DsnetError(f"there is no file or folder {shorten(name, 500)}")
        if not images:
            raise DsnetError(f"{problem} (by their suffix: {', '.join(sorted(SUFFIXES))})")
        for path in images:
            files.setdefault(os.path.abspath(path), path)
    return list(files.values())


def _in_folder(folder: str) -> list[str]:
    def stop(error: OSError) -> None:
        raise DsnetError(f"{error.filename} cannot be listed: {error.strerror}")

    found = []
    for inside, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(inside, file) for file in files if is_image_file(file)]
    return sorted(found, key=_parts)


def _matching(pattern: str) -> list[str]:
    found: set[str] = set()
    for path in glob.glob(pattern, recursive=True):
        if os.path.isdir(path):
            found.update(_in_folder(path))
        elif is_image_file(os.path.basename(path)):
            found.add(path)
    return sorted(found, key=_parts)


def _parts(path: str) -> tuple[str, ...]:
    return Path(path).parts
