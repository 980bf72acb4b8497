"""The result of `dsnet bench` as text, as a chart and as a page."""

from __future__ import annotations

from collections.abc import Mapping

from dsnet.benchmark.results import BatchResult, BenchResult, Spread
from dsnet.report.page import escape, html_table, page
from dsnet.report.plot import Bar, Chart, bar_plot
from dsnet.report.text import human, table

__all__ = ["bench_page", "bench_plot", "bench_text"]

FEW = 8  # routes that are named one by one
HEADER = ("ms a batch", "quartiles", "of full", "ideal / it")


def bench_text(result: BenchResult) -> str:
    """Format the conditions, a table per batch size, and an explanation of its rows."""
    tables = [
        table([f"batch {r.batch}", *HEADER], _rows(result, r), left=(f"batch {r.batch}",))
        for r in result.results
    ]
    return "\n\n".join([_conditions(result), *tables, "\n".join(_explanations(result))])


def bench_plot(result: BenchResult) -> Chart:
    """Plot theory, ideal and measured time of the mix, relative to all images at the largest route."""
    names = ("multiply-adds", "ideal time", "measured time")
    groups: dict[str, list[Bar]] = {}
    for r in result.results:
        full = r.times["full"].median
        shares = (1 / result.theory, r.ideal / full, r.times["gated"].median / full)
        group = f"batch {r.batch}"
        groups[group] = [Bar(s, f"{name}, {group}: {s:.1%}") for name, s in zip(names, shares, strict=True)]
    return bar_plot(groups, names, axis="percent of all images at the largest route")


def bench_page(result: BenchResult) -> str:
    """Build a page with chart, conditions, tables and explanations."""
    conditions = (f"<p>{escape(line)}</p>" for line in _conditions(result).splitlines())
    parts = [bench_plot(result).html(), *conditions]
    for r in result.results:
        parts += [f"<h2>Batch {r.batch}</h2>", html_table(("measured", *HEADER), _rows(result, r))]
    explanations = "".join(f"<li>{escape(line)}</li>" for line in _explanations(result))
    return page(f"{result.network} on {result.device}", *parts, f"<ul>{explanations}</ul>")


def _rows(result: BenchResult, r: BatchResult) -> list[list[str]]:
    full = r.times["full"].median

    def measured(name: str, spread: Spread, ratio: float | None = None) -> list[str]:
        return [
            name,
            f"{spread.median:.2f}",
            f"{spread.low:.2f} to {spread.high:.2f}",
            f"{spread.median / full:.0%}",
            "" if ratio is None else f"{ratio:.2f}",
        ]

    names = {
        "full": "full",
        "gate largest": f"largest of the gate (route {result.gate_largest})",
        "largest": "largest, no plan",
        **{name: name for name in ("masking", "indexing", "slicing")},
    }
    rows = [measured(name, r.times[key]) for key, name in names.items() if key in r.times]
    rows.append(measured("gated plan", r.times["gated"], r.ratio))
    rows.append(measured("gated stream", r.times["stream"], r.ratio_stream))
    rows.append(["gated: multiply-adds", "", "", f"{1 / result.theory:.0%}", ""])
    rows.append(["gated: ideal", f"{r.ideal:.2f}", "", f"{r.ideal / full:.0%}", ""])
    if "in turn" in r.times:
        rows.append(measured("gated: ideal, in turn", r.times["in turn"]))
    rows.append(measured("cascade plan", r.times["cascade"], r.ratio_cascade))
    rows.append(["cascade: ideal", f"{r.ideal_cascade:.2f}", "", f"{r.ideal_cascade / full:.0%}", ""])
    rows += [measured(f"{b.name} ({b.backend})", r.times[b.candidate]) for b in result.baselines]
    return rows


def _conditions(result: BenchResult) -> str:
    where = result.conditions
    clocks = [
        f"{mhz:.0f} MHz ({what})" for what, mhz in (("CPU", where.cpu_mhz), ("GPU", where.gpu_mhz)) if mhz
    ]
    load = [] if where.load is None else [f"load {where.load[0]:.2f} before"]
    threads = "one thread" if where.threads == 1 else f"{where.threads} threads"
    height, width = result.image_size
    lines = [
        f"{result.network} at {height} × {width} on {result.device}, {result.backend}, {result.precision}, "
        f"{result.memory}: {human(result.resident)}B of weights in {result.programs} programs",
        f"{', '.join([threads, *clocks, *load, f'torch {result.torch}'])}; medians of {result.repeats} "
        "rounds, in each of which everything is timed once",
        f"routes, {result.mix.source}: {_mix(result.mix.shares, result.madds)}",
        f"by multiply-adds the mix is {result.theory:.2f} × as fast as all images at the largest route",
    ]
    if result.missing:
        lines.append(f"missing, for lack of time: {', '.join(result.missing)}")
    return "\n".join(lines)


def _mix(shares: Mapping[int, float], madds: Mapping[int, int]) -> str:
    if len(shares) <= FEW:
        return ", ".join(f"{share:.0%} at {r} ({human(madds[r])})" for r, share in shares.items())
    commonest = max(shares, key=lambda route: shares[route])
    return (
        f"{len(shares)} from {min(shares)} to {max(shares)}, "
        f"at most {shares[commonest]:.0%} at one ({commonest})"
    )


def _explanations(result: BenchResult) -> list[str]:
    """One line for every kind of row that was measured."""
    first, *further = zip(result.mix.cascade.routes, result.mix.cascade.shares, strict=True)
    then = "".join(f", then route {number} for {share:.0%}" for number, share in further)
    measured = {key for r in result.results for key in r.times}
    lines = {
        "full": f"full: the plan, all images at the network's largest route{_route(result.largest, result)}",
        "gate largest": "largest of the gate: the plan, all images at the largest route that this gate takes"
        f"{_route(result.gate_largest, result)}",
        "largest": "largest, no plan: the network itself, all images at the largest route",
        "masking": "masking: the network at full width, channels set to zero",
        "indexing": "indexing: the network, groups by route, filters gathered by index",
        "slicing": "slicing: the network, groups by route, filters sliced",
        "gated": "gated plan, gated stream: every image at its route",
        "alone": "gated: ideal: stand-alone networks of the routes on whole batches, weighted by the mix",
        "in turn": "gated: ideal, in turn: the same networks, one after the other as the mix has them",
        "cascade": f"cascade plan: route {first[0]} for all images{then}",
    }
    shown = [line for key, line in lines.items() if key in measured or key == "alone"]
    for b in result.baselines:
        shown.append(f"{b.name}: the static network of {human(b.madds)} multiply-adds, on {b.backend}")
    return shown


def _route(number: int, result: BenchResult) -> str:
    """Return the number and cost of a route, in brackets."""
    return f" (route {number}, {human(result.madds[number])} multiply-adds)"
