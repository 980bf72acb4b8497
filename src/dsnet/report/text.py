"""Plain-text tables, and numbers in readable units."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from dsnet.counts import human
from dsnet.errors import printable

__all__ = ["bar", "counts_table", "csv_text", "human", "one_line", "roughly", "table"]


def bar(value: float, largest: float, width: int = 24) -> str:
    """Draw a bar whose length is the share of ``value`` in ``largest``."""
    return "█" * max(1, round(width * value / largest))


def roughly(seconds: float) -> str:
    """Format an estimated duration in words.

    >>> roughly(700), roughly(4000)
    ('about 12 minutes', 'about 67 minutes')
    """
    for limit, unit, length in ((90, "seconds", 1), (90 * 60, "minutes", 60), (36 * 3600, "hours", 3600)):
        if seconds < limit:
            count = max(1, round(seconds / length))
            return f"about {count} {unit if count > 1 else unit.removesuffix('s')}"
    return f"about {round(seconds / 86400)} days"


def one_line(text: str) -> str:
    r"""Escape line breaks and tabs.

    >>> one_line("a\nb")
    'a\\nb'
    """
    return printable(text).replace("\n", r"\n").replace("\t", r"\t")


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows of the same keys as comma-separated values with a header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> str:
    """Format an aligned table.

    Args:
        header: Names of the columns.
        rows: Cells; control characters, as in names of files, are escaped.
        left: Names of the columns to align left instead of right.
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


def counts_table(name: str, counts: Mapping[int, int] | Mapping[int | str, int]) -> str:
    """Format how many images took each route or choice, with shares and bars."""
    total, largest = sum(counts.values()), max(counts.values())
    rows = [
        [str(key), str(count), f"{count / total:.0%}", bar(count, largest) if count else ""]
        for key, count in counts.items()
    ]
    return table([name, "images", "share", ""], rows, left=("",))
