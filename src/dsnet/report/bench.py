"""A benchmark as text, as a picture and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsnet.report.page import escape, page
from dsnet.report.plot import Bar, bar_plot
from dsnet.report.text import human, table
from dsnet.runtime.bench import BatchResult, BenchResult, Spread

__all__ = ["bench_page", "bench_plot", "bench_text"]

FEW = 8  # routes that are named one by one
HEADER = ["way", "ms a batch", "quartiles", "of full", "ideal / it"]


def bench_text(found: BenchResult) -> str:
    """What was measured, a table for every batch size, and what its rows are."""
    tables = [
        table([f"batch {r.batch}", *HEADER[1:]], _rows(found, r), left=(f"batch {r.batch}",))
        for r in found.results
    ]
    return "\n\n".join([_about(found), *tables, _explained(found)])


def bench_plot(found: BenchResult, title: str | None = None) -> str:
    """Theory, ideal and measured time of the mix, as shares of everyone's at the largest route; an SVG."""
    names = ("multiply-adds", "ideal time", "measured time")
    groups: dict[str, list[Bar]] = {}
    for r in found.results:
        full = r.times["full"].median
        shares = (1 / found.theory, r.ideal / full, r.times["gated"].median / full)
        group = f"batch {r.batch}"
        groups[group] = [Bar(s, f"{name}, {group}: {s:.1%}") for name, s in zip(names, shares, strict=True)]
    if title is None:
        title = f"{found.network} on {found.device}, {found.backend}"
    return bar_plot(title, groups, names, axis="percent of everyone at the largest route")


def bench_page(found: BenchResult) -> str:
    """All of it as a web page."""
    parts = [bench_plot(found, ""), *(f"<p>{escape(line)}</p>" for line in _about(found).splitlines())]
    for r in found.results:
        rows = [_html_row("th", HEADER), *(_html_row("td", row) for row in _rows(found, r))]
        parts.append(f'<h2>Batch {r.batch}</h2>\n<div class="wide"><table>{"".join(rows)}</table></div>')
    parts.append(f"<p>{escape(_explained(found))}</p>")
    return page(f"{found.network} on {found.device}", "\n".join(parts))


def _html_row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _rows(found: BenchResult, r: BatchResult) -> list[list[str]]:
    """Every way, with its spread."""
    full = r.times["full"].median

    def measured(name: str, spread: Spread, ratio: float | None = None) -> list[str]:
        quartiles = f"{spread.low:.2f} to {spread.high:.2f}"
        return [
            name,
            f"{spread.median:.2f}",
            quartiles,
            f"{spread.median / full:.0%}",
            "" if ratio is None else f"{ratio:.2f}",
        ]

    rows = [measured("full", r.times["full"]), measured("largest, no plan", r.times["largest"])]
    rows += [measured(way, r.times[way]) for way in ("masking", "indexing", "slicing")]
    rows.append(measured("gated plan", r.times["gated"], r.ratio))
    rows.append(measured("gated stream", r.times["stream"], r.ratio_stream))
    rows.append(["gated: multiply-adds", "", "", f"{1 / found.theory:.0%}", ""])
    rows.append(["gated: ideal", f"{r.ideal:.2f}", "", f"{r.ideal / full:.0%}", ""])
    if "in turn" in r.times:
        rows.append(measured("gated: ideal, in turn", r.times["in turn"]))
    rows.append(measured("cascade plan", r.times["cascade"], r.ratio_cascade))
    rows.append(["cascade: ideal", f"{r.ideal_cascade:.2f}", "", f"{r.ideal_cascade / full:.0%}", ""])
    if found.twin is not None:
        rows.append(measured(f"{found.twin} ({found.twin_backend})", r.times["twin"]))
    return rows


def _about(found: BenchResult) -> str:
    where = found.conditions
    clocks = [
        f"{mhz:.0f} MHz ({what})" for what, mhz in (("CPU", where.cpu_mhz), ("GPU", where.gpu_mhz)) if mhz
    ]
    load = [] if where.load is None else [f"load {where.load[0]:.2f} before"]
    threads = "one thread" if where.threads == 1 else f"{where.threads} threads"
    around = ", ".join([threads, *clocks, *load, f"torch {found.torch}"])
    height, width = found.image_size
    return (
        f"{found.network} at {height} × {width} on {found.device}, {found.backend}, {found.precision}, "
        f"{found.memory}: {human(found.resident)}B of weights in {found.programs} programs\n"
        f"{around}; medians of {found.repeats} rounds, all ways in turn\n"
        f"routes, {found.mix.source}: {_named(found.mix.shares)}\n"
        f"by multiply-adds the mix is {found.theory:.2f} × as fast as everyone at the largest route"
    )


def _named(shares: Mapping[int, float]) -> str:
    if len(shares) <= FEW:
        return ", ".join(f"{share:.0%} at {route}" for route, share in shares.items())
    most = max(shares, key=lambda route: shares[route])
    return f"{len(shares)} from {min(shares)} to {max(shares)}, at most {shares[most]:.0%} at one ({most})"


def _explained(found: BenchResult) -> str:
    first, *further = zip(found.mix.cascade.routes, found.mix.cascade.shares, strict=True)
    goes_on = "".join(f", then {number} for {share:.0%}" for number, share in further)
    lines = [
        "full: the plan, all images at the largest route. largest, masking, indexing, slicing: the network",
        "itself, without a plan: all images at the largest route; everything at full width, channels zeroed;",
        "groups by route, filters gathered by number; groups, filters sliced. gated plan: images at their",
        "routes. ideal: stand-alone networks of the routes on whole batches, weighted by the mix; each timed",
        "right after itself or, for single images, also in turn.",
        f"cascade plan: route {first[0]} for all{goes_on}.",
    ]
    if found.twin is not None:
        lines.append(f"{found.twin}: the static network, on {found.twin_backend}.")
    return "\n".join(lines)
