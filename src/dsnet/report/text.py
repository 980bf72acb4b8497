"""Plain-text tables and numbers as people write them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from dsnet.counts import human
from dsnet.errors import printable

__all__ = ["bar", "csv_text", "human", "one_line", "roughly", "table"]


def bar(value: float, largest: float, width: int = 24) -> str:
    """A bar as long as ``value`` is of ``largest``."""
    return "█" * max(1, round(width * value / largest))


def roughly(seconds: float) -> str:
    """A duration in words, as exact as an estimate is.

    >>> roughly(700), roughly(4000)
    ('about 12 minutes', 'about 67 minutes')
    """
    for limit, unit, length in ((90, "seconds", 1), (90 * 60, "minutes", 60), (36 * 3600, "hours", 3600)):
        if seconds < limit:
            count = max(1, round(seconds / length))
            return f"about {count} {unit if count > 1 else unit.removesuffix('s')}"
    return f"about {round(seconds / 86400)} days"


def one_line(text: str) -> str:
    r"""Text that stays on its line.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows of the same keys as comma-separated values, keys first."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> str:
    """Columns that line up; numbers to the right, columns named in ``left`` to the left.

    Cells may be names of files: what would move a terminal's cursor is shown as an escape.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["─" * width for width in widths]), *map(line, rows)])
