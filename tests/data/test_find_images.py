"""Names, folders and patterns expand to image files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsnet.data.find_images import find_images
from tests.support import error_of


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty files; it is their names that count."""
    monkeypatch.chdir(tmp_path)
    names = ["b/2.png", "b/10.png", "a/x/1.JPG", "a/0.webp", "a/note.txt", "a-b/5.png", "x[1].png", "named"]
    for name in (*names, ".hidden/7.png", "b/._2.png", "empty/note.txt"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).touch()
    return tmp_path


def test_folders_and_patterns_give_their_images_in_order(tree: Path) -> None:
    everything = ["a/0.webp", "a/x/1.JPG", "a-b/5.png", "b/10.png", "b/2.png", "x[1].png"]
    assert find_images(["."]) == [f"./{path}" for path in everything]
    assert find_images([tree]) == [str(tree / path) for path in everything]
    assert find_images(["**"]) == find_images(["*"]) == everything
    assert find_images(["**/*.png"]) == everything[2:]
    assert find_images(["?/*.png"]) == everything[3:5]
    assert find_images(["[ab]"]) == ["a/0.webp", "a/x/1.JPG", "b/10.png", "b/2.png"]  # folders that match
    assert find_images(["x[1].png"]) == ["x[1].png"]  # a name before a pattern
    assert find_images(["b", "a"]) == ["b/10.png", "b/2.png", "a/0.webp", "a/x/1.JPG"]
    assert find_images(["named", Path("a/note.txt")]) == ["named", "a/note.txt"]  # whatever is named


def test_each_file_is_returned_once(tree: Path) -> None:
    given = ["b/2.png", "./b/2.png", str(tree / "b" / "2.png"), "a/../b/2.png", "b", "b/*.png"]
    assert find_images(given) == ["b/2.png", "b/10.png"]


def test_missing_files_and_empty_folders_are_errors(tree: Path) -> None:
    assert "no file or folder 'c.png'" in error_of(lambda: find_images(["b", "c.png"]))
    assert "no image matches 'c/**/*.png'" in error_of(lambda: find_images(["b", "c/**/*.png"]))
    assert "no image matches '**/*.txt'" in error_of(lambda: find_images(["**/*.txt"]))
    message = error_of(lambda: find_images(["empty"]))
    assert message.startswith("empty has no images")
    assert ".jpeg, .jpg" in message
