"""Plain-text tables and numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from dsnet.counts import human

__all__ = ["bar", "human", "table"]


def bar(value: float, largest: float, width: int = 24) -> str:
    """A bar as long as ``value`` is of ``largest``."""
    return "█" * max(1, round(width * value / largest))


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
