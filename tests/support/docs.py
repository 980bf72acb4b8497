"""Code blocks of the documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
