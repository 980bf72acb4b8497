"""Plain-text tables and numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from dsnet.counts import human

__all__ = ["bar", "human", "roughly", "table"]


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[str] = ()) -> str:
    """Columns that line up; numbers to the right, columns named in ``left`` to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(header, cells, widths, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), line(["─" * width for width in widths]), *map(line, rows)])
