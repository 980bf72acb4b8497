"""The table of a supernet's routes: sizes, multiply-adds and parameters."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dsnet.cost import cost
from dsnet.counts import Convention
from dsnet.models import Supernet
from dsnet.report.text import bar, human, table
from dsnet.routes import Route, Slice, evenly_spaced

__all__ = ["route_rows", "route_table"]

COUNTS = ("madds", "params")
SIZES = tuple(f.name for f in fields(Slice) if f.name != "groups")  # of which there may be a hundred


def route_rows(
    model: Supernet, *, image_size: int | tuple[int, int] | None = None, convention: Convention = "paper"
) -> list[dict[str, Any]]:
    """Return every route as plain data, with its multiply-adds and parameters."""
    rows = []
    for route in model.space:
        counted = cost(model, route, image_size)
        rows.append({**route.to_dict(), "madds": counted.madds(convention), "params": counted.params})
    return rows


def route_table(model: Supernet, rows: list[dict[str, Any]], *, max_rows: int) -> str:
    """Format a table: sizes that differ between routes as columns, the others in one line above it."""
    routes = [Route.from_dict({k: v for k, v in row.items() if k not in COUNTS}) for row in rows]
    images = ["" if route.image_size is None else f"{route.image_size} px" for route in routes]
    columns = {"image": images} | {name: [_sizes(route, name) for route in routes] for name in SIZES}
    varying = [name for name in columns if len(set(columns[name])) > 1]
    constant = [f"{name} {columns[name][0]}" for name in columns if name not in varying and columns[name][0]]
    shown = evenly_spaced(len(rows), max_rows)
    largest = rows[-1]["madds"]
    several = model.space.gates > 1
    header = ["route", *(["choices"] if several else []), *varying, "MAdds", "params", "of the largest"]
    body = [
        [
            str(row["number"]),
            *([" ".join(map(str, row["choices"]))] if several else []),
            *(columns[name][i] for name in varying),
            human(row["madds"]),
            human(row["params"]),
            f"{bar(row['madds'], largest)} {row['madds'] / largest:.0%}",
        ]
        for i, row in enumerate(rows)
        if i in shown
    ]
    lines = [f"The same on every route: {'; '.join(constant)}"] if constant else []
    lines.append(table(header, body, left=("of the largest",)))
    if len(shown) < len(rows):
        lines.append(f"{len(shown)} of {len(rows)} routes, evenly spaced; --all shows every one")
    return "\n".join(lines)


def _sizes(route: Route, name: str) -> str:
    sizes = [getattr(stage, name) for stage in route.stages]
    return "" if sizes[0] is None else " ".join(map(str, sizes))
