"""Code blocks of the documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


def example_modules() -> dict[str, str]:
    """The modules that CONTRIBUTING.md shows, by the names that it gives them."""
    blocks = code_blocks("CONTRIBUTING.md")
    return {re.findall(r"\A# (\w+)\.py\n", block)[0]: block for block in blocks}
