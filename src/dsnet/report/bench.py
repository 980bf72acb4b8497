"""A benchmark as text, as a picture and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsnet.benchmark.api import Baseline, BatchResult, BenchResult, Spread
from dsnet.report.page import escape, page
from dsnet.report.plot import WIDE, Bar, Size, bar_plot, for_any_width
from dsnet.report.text import human, table

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


def bench_plot(found: BenchResult, title: str | None = None, size: Size = WIDE) -> str:
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
    return bar_plot(title, groups, names, axis="percent of everyone at the largest route", size=size)


def bench_page(found: BenchResult) -> str:
    """All of it as a web page."""
    picture = for_any_width(lambda size: bench_plot(found, "", size))
    parts = [picture, *(f"<p>{escape(line)}</p>" for line in _about(found).splitlines())]
    for r in found.results:
        rows = [_html_row("th", HEADER), *(_html_row("td", row) for row in _rows(found, r))]
        parts.append(f'<h2>Batch {r.batch}</h2>\n<div class="wide"><table>{"".join(rows)}</table></div>')
    parts.append(
        "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in _explained(found).splitlines()) + "</ul>"
    )
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

    rows = [measured("full", r.times["full"])]
    if "gate largest" in r.times:
        rows.append(measured(f"largest of the gate (route {found.gate_largest})", r.times["gate largest"]))
    if "largest" in r.times:
        rows.append(measured("largest, no plan", r.times["largest"]))
    rows += [measured(way, r.times[way]) for way in ("masking", "indexing", "slicing") if way in r.times]
    rows.append(measured("gated plan", r.times["gated"], r.ratio))
    rows.append(measured("gated stream", r.times["stream"], r.ratio_stream))
    rows.append(["gated: multiply-adds", "", "", f"{1 / found.theory:.0%}", ""])
    rows.append(["gated: ideal", f"{r.ideal:.2f}", "", f"{r.ideal / full:.0%}", ""])
    if "in turn" in r.times:
        rows.append(measured("gated: ideal, in turn", r.times["in turn"]))
    rows.append(measured("cascade plan", r.times["cascade"], r.ratio_cascade))
    rows.append(["cascade: ideal", f"{r.ideal_cascade:.2f}", "", f"{r.ideal_cascade / full:.0%}", ""])
    rows += [measured(f"{name} ({backend})", r.times[way]) for way, name, backend, _ in _static(found)]
    return rows


def _static(found: BenchResult) -> tuple[Baseline, ...]:
    """Static networks; of earlier versions there is one at most."""
    if found.baselines or found.twin is None:
        return found.baselines
    return (Baseline("twin", found.twin, str(found.twin_backend), 0),)


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
        f"routes, {found.mix.source}: {_named(found.mix.shares, found.madds)}\n"
        f"by multiply-adds the mix is {found.theory:.2f} × as fast as everyone at the largest route"
        + "".join(f"\nmissing, for lack of time: {', '.join(found.missing)}" for _ in found.missing[:1])
    )


def _named(shares: Mapping[int, float], madds: Mapping[int, int]) -> str:
    if len(shares) <= FEW:
        costs = {route: f" ({human(madds[route])})" if route in madds else "" for route in shares}
        return ", ".join(f"{share:.0%} at {route}{costs[route]}" for route, share in shares.items())
    most = max(shares, key=lambda route: shares[route])
    return f"{len(shares)} from {min(shares)} to {max(shares)}, at most {shares[most]:.0%} at one ({most})"


def _explained(found: BenchResult) -> str:
    """A line for every kind of row that is there."""
    first, *further = zip(found.mix.cascade.routes, found.mix.cascade.shares, strict=True)
    goes_on = "".join(f", then route {number} for {share:.0%}" for number, share in further)
    measured = {way for result in found.results for way in result.times}
    lines = {
        "full": f"full: the plan, all images at the network's largest route{_route(found.largest, found)}",
        "gate largest": "largest of the gate: the plan, all images at the largest route that this gate takes"
        f"{_route(found.gate_largest, found)}",
        "largest": "largest, no plan: the network itself, all images at the largest route",
        "masking": "masking: the network at full width, channels set to zero",
        "indexing": "indexing: the network, groups by route, filters gathered by index",
        "slicing": "slicing: the network, groups by route, filters sliced",
        "gated": "gated plan, gated stream: every image at its route",
        "alone": "gated: ideal: stand-alone networks of the routes on whole batches, weighted by the mix",
        "in turn": "gated: ideal, in turn: the same networks, one after the other as the mix has them",
        "cascade": f"cascade plan: route {first[0]} for all images{goes_on}",
    }
    shown = [line for way, line in lines.items() if way in measured or way == "alone"]
    for _, name, backend, cost in _static(found):
        costs = f" of {human(cost)} multiply-adds" if cost else ""
        shown.append(f"{name}: the static network{costs}, on {backend}")
    return "\n".join(shown)


def _route(number: int | None, found: BenchResult) -> str:
    """Which, and what it costs, in brackets."""
    if number is None:
        return ""
    cost = f", {human(found.madds[number])} multiply-adds" if number in found.madds else ""
    return f" (route {number}{cost})"
