"""Write the tables of README.md and docs/ from the figures in benchmarks/results.

    python -m benchmarks.tables [--check]

A table stands between ``<!-- table NAME [key=value …] -->`` and ``<!-- end -->``; NAME is a JSON file, and
the keys choose some of its rows (``batch=1``, ``epochs=30``). ``NAME,NAME`` puts several files of
`benchmarks.equal_accuracy` into one table; ``NAME@BATCH,NAME@BATCH`` puts files of `dsnet bench` side by
side, one batch size of each.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsnet.counts import human
from dsnet.routes import evenly_spaced

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/training.md",
    "docs/routing.md",
    "docs/runtime.md",
    "docs/detection.md",
    "docs/pretrained.md",
)
TABLE = re.compile(r"(<!-- table (\S+)((?: \w+=\S+)*) -->\n).*?(<!-- end -->)", re.S)
Data = Mapping[str, Any]
METHODS = ("full", "masking", "indexing", "slicing", "ideal", "packed")  # of `benchmarks.slicing`


ACCURACY = "test accuracy in percent"
MEANS = "mean ± standard deviation (seeds)"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Format a table, its first column to the left, with a caption that says what it was measured on."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, f"\n*{caption}*"]) + "\n"


def source(data: Data) -> str:
    """Name machine, torch version and date."""
    return f"{data['machine']}, torch {data['torch']}, {data['date']}"


def spread(timings: Iterable[tuple[float, float, float]]) -> str:
    """Say how far the quartiles of (median, first quartile, third quartile) are from their medians."""
    distances = [max(1 - low / median, high / median - 1) for median, low, high in timings]
    typical, largest = statistics.median(distances), max(distances)
    return f"medians; quartiles typically {typical:.1%} and at most {largest:.0%} away"


def slicing_table(name: str, data: Data, batch: str | None = None) -> str:
    """Tabulate milliseconds of the smallest route, by method."""
    rows, timings = [], []
    for row in data["results"]:
        if batch in (None, str(row["batch"])):
            timings += [
                (row["times"][method]["ms"], *row["times"][method]["quartiles"]) for method in METHODS
            ]
            ms = [row["times"][method]["ms"] for method in METHODS]
            ratio = row["times"]["slicing"]["ms"] / row["times"]["ideal"]["ms"]
            rows.append([row["network"], str(row["batch"]), *(f"{t:.2f}" for t in ms), f"{ratio:.3f}"])
    threads = f"{_threads(data)}, " if "cpu" in data["torch"] else ""
    caption = f"{source(data)}, {threads}{data['dtype']}; milliseconds a batch, {spread(timings)}"
    return markdown(["network", "batch", *METHODS, "slicing / ideal"], rows, caption)


def training_table(name: str, data: Data) -> str:
    """Tabulate a sandwich step beside the sum of its parts."""
    header = [
        "network",
        "batch",
        "precision",
        "execution",
        "step, ms",
        "parts, ms",
        "step / parts",
        "images/s",
        "data preparation",
    ]
    rows = [
        [
            row["model"],
            str(row["batch"]),
            row["precision"],
            "CUDA graphs" if row["graphs"] else "eager",
            f"{row['step']:.1f}",
            f"{row['sum']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['images_per_second']:,}",
            f"{row['images_share']:.1%} of the step",
        ]
        for row in data["results"]
    ]
    steps = spread((row["step"], *row["quartiles"]) for row in data["results"])
    return markdown(header, rows, f"{source(data)}, channels-last; steps: {steps}")


def schemes_table(name: str, data: Data, epochs: str | None = None) -> str:
    """Tabulate test accuracy by scheme and route; stand-alone networks are one row."""
    runs = [run for run in data["runs"] if epochs in (None, str(run["epochs"]))]
    alone = {run["name"].removeprefix("alone ") for run in runs if run["name"].startswith("alone")}
    routes = sorted(map(int, alone or runs[0]["test"]))
    names = dict.fromkeys(run["name"] for run in runs if not run["name"].startswith("alone"))
    rows = []
    for length in sorted({run["epochs"] for run in runs}):
        for scheme in [*names, *(["stand-alone networks"] if alone else [])]:
            cells = []
            for route in routes:
                name = f"alone {route}" if scheme == "stand-alone networks" else scheme
                accuracies = [
                    run["test"][str(route)]
                    for run in runs
                    if (run["name"], run["epochs"]) == (name, length) and str(route) in run["test"]
                ]
                cells.append(_mean(accuracies))
            if any(cells):
                rows.append([scheme, str(length), *cells])
    madds = {route: count for run in runs for route, count in run["madds"].items()}
    costs = [madds[str(route)] for route in routes]
    sizes = [_millions(cost) for cost in costs]
    header = [
        "scheme",
        "epochs",
        *(f"route {route} ({size})" for route, size in zip(routes, sizes, strict=True)),
    ]
    return markdown(header, rows, f"{source(data)}; {ACCURACY}, {MEANS}")


def calibration_table(name: str, data: Data) -> str:
    """Tabulate test accuracy by how the batch-norm statistics were computed."""
    rows = [[row["case"], _mean(row["smallest"]), _mean(row["largest"])] for row in data["results"]]
    header = ["statistics", "smallest route", "largest route"]
    return markdown(header, rows, f"{source(data)}; {ACCURACY}, {MEANS}")


ROUTERS = {
    "cascade": "cascade",
    "paper": "gate: the paper's losses",
    "target": "gate: CLS alone",
    "complexity": "gate: CP alone",
    "sgs": "gate: SGS alone",
    "target+complexity": "gate: CLS + CP",
    "target+sgs": "gate: CLS + SGS",
    "give_up": "gate: the paper's, give up",
    "scalar": "gate: the paper's, scalar head",
    "separate": "gate: the paper's, separate first layer",
    "even": "gate: the paper's, even targets",
    "held_out": "gate: the paper's, held-out images",
    "value": "gate: value",
    "value_wide": "gate: value, own layer of 128",
    "value_wide_held_out": "gate: value, own layer of 128, held-out images",
}


def routing_table(name: str, data: Data, routers: str | None = None) -> str:
    """Tabulate accuracies of routers at budgets, and points above the static mix at the same cost."""
    rows = []
    for router in list(ROUTERS) if routers is None else routers.split(","):
        same = [row for row in data["results"] if row["router"] == router]
        if not same:
            continue
        owns = [row["own"] for row in same if row["own"]]
        own = (
            f"{_only(o['accuracy'] for o in owns)} at {_only(100 * o['cost'] for o in owns)} %"
            if owns
            else "–"
        )
        cells = []
        for share in data["budgets"]:
            at = [b for row in same for b in row["budgets"] if abs(b["share"] - share) < 1e-9]
            gain = [b["accuracy"] - b["static"] for b in at]
            spread = f" ± {statistics.stdev(gain):.1f}" if len(gain) > 1 else ""
            mean = f"({statistics.mean(gain):+.1f}{spread})" if at else ""
            cells.append(f"{_only(b['accuracy'] for b in at)} {mean}" if at else "–")
        rows.append([ROUTERS[router], own, *cells])
    seeds = len({row["run"] for row in data["results"]})
    header = ["router", "its own decision", *(f"{share:.0%}" for share in data["budgets"])]
    brackets = "points above the static mix of two routes at the same mean cost, ± standard deviation"
    caption = f"{source(data)}; {ACCURACY}, mean of {seeds} seeds; in brackets {brackets}"
    return markdown(header, rows, caption)


def gating_table(name: str, data: Data) -> str:
    """Tabulate a step of Stage II beside the passes that it needs."""
    rows = [
        [
            row["model"],
            " + ".join(map(str, row["choices"])),
            str(row["batch"]),
            f"{row['passes']:.1f}",
            f"{row['needed']:.1f}",
            f"{row['step']:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in data["results"]
    ]
    header = ["network", "choices", "batch", "passes, ms", "needed, ms", "step, ms", "step / needed"]
    return markdown(header, rows, f"{source(data)}, {_threads(data)}")


def bench_table(name: str, data: Data) -> str:
    """Tabulate mixed batches of a plan beside its alternatives."""
    others = [way for way in ("masking", "indexing", "slicing") if way in data["results"][0]["times"]]
    streamed = ["ideal / stream"] if "stream" in data["results"][0]["times"] else []
    of_gate = ["gate largest"] if "gate largest" in data["results"][0]["times"] else []
    header = ["batch", "largest route", *others, "plan", "ideal", "ideal / plan", *streamed, "speed-up"]
    header[2:2] = [f"route {data['gate_largest']} (gate's largest)" for _ in of_gate]
    header.append("cascade")
    static = [(own["way"], f"{own['name']} ({own['backend']})") for own in data.get("baselines", [])]
    if not static and data["twin"]:  # of earlier versions
        static = [("twin", f"{data['twin']} ({data['twin_backend']})")]
    header += ["ideal / cascade", *(name for _, name in static)]
    rows, timings = [], []
    for row in data["results"]:
        ms = {way: timing["median"] for way, timing in row["times"].items()}
        shown = ("full", *of_gate, *others, "gated", "cascade", *(way for way, _ in static))
        timings += [_quartiles(row["times"][way]) for way in shown]
        cells = [f"{ms[way]:.2f}" for way in ("full", *of_gate, *others, "gated")]
        cells += [f"{row['ideal']:.2f}", f"{row['ratio']:.2f}"]
        cells += [f"{row['ratio_stream']:.2f}" for _ in streamed]
        cells += [f"{row['speedup']:.2f} ×", f"{ms['cascade']:.2f}", f"{row['ratio_cascade']:.2f}"]
        rows.append([str(row["batch"]), *cells, *(f"{ms[way]:.2f}" for way, _ in static)])
    mix = _mix(data["shares"]) if len(data["shares"]) <= 8 else data["mix"]
    caption = f"{source(data)}, {_setup(data)}; milliseconds a batch, {spread(timings)}; {mix}"
    return markdown(header, rows, caption)


def _threads(data: Data) -> str:
    return f"{data['threads']} thread{'s' * (data['threads'] > 1)}"


def _setup(data: Data) -> str:
    return f"{_threads(data)}, {data['backend']}, {data['precision']}"


def _mix(shares: Mapping[str, float]) -> str:
    if len(set(shares.values())) == 1:
        return f"equal shares at routes {', '.join(shares)}"
    return ", ".join(f"{share:.0%} at route {route}" for route, share in shares.items())


def _quartiles(timing: Mapping[str, float]) -> tuple[float, float, float]:
    return timing["median"], timing["low"], timing["high"]


def equal_accuracy_table(name: str, data: Data) -> str:
    """Tabulate a cascade beside a single route for all images and the largest route for all images."""
    ways = ("cascade", "single", "largest")
    rows = []
    for file in name.split(","):
        data = _read(file)
        machine = f"{data['machine']}, {_setup(data)}"
        for row in data["results"]:
            times = [f"{m:.2f} ({low:.2f}–{high:.2f})" for m, low, high in (_quartiles(row[w]) for w in ways)]
            times[1] = f"route {data['measured']['route']}: {times[1]}"
            rows.append([machine, f"{row['batch']:,}", *times, f"{row['gain']:.2f} ×"])
    header = ["machine", "batch", "cascade, ms", "single route, ms", "largest route, ms", "cascade faster by"]
    return markdown(header, rows, f"{data['date']}; milliseconds a batch, medians (quartiles)")


def photos_table(name: str, data: Data) -> str:
    """Tabulate the default settings for photos on a CPU beside a plain network."""
    rows = []
    for network, rate in dict.fromkeys((run["network"], run.get("rate")) for run in data["runs"]):
        same = [run for run in data["runs"] if (run["network"], run.get("rate")) == (network, rate)]
        ends = [list(run["test"].values()) for run in same]
        title = (
            f"`{network}`"
            if rate is None
            else f"{same[0]['network'].replace('resnet', 'ResNet')}, learning rate {rate}"
        )
        cells = [f"{same[0]['params'] / 1e6:.2f}M", f"{_mean([r['cpu_seconds'] for r in same], 0)}"]
        cells += [
            "–" if len(ends[0]) == 1 else _mean([end[0] for end in ends], 1),
            _mean([end[-1] for end in ends], 1),
        ]
        rows.append([title, *cells])
    header = ["network", "parameters", "CPU seconds", "smallest route", "largest route"]
    return markdown(header, rows, f"{source(data)}, one thread; {ACCURACY}, {MEANS}")


def modelopt_table(name: str, data: Data) -> str:
    """Tabulate networks that ModelOpt pruned to the MAdds of routes; of several rates the best counts."""
    rows = []
    for route, epochs in dict.fromkeys((run["route"], run["epochs"]) for run in data["runs"]):
        same = [run for run in data["runs"] if (run["route"], run["epochs"]) == (route, epochs)]
        best = [max(r["test"] for r in same if r["seed"] == seed) for seed in {r["seed"] for r in same}]
        target, count = data["madds"][str(route)], statistics.mean(run["madds"] for run in same)
        title = f"route {route} ({_millions(target)})" if epochs else "not pruned"
        searches = [r["search_seconds"] for r in same if "search_seconds" in r]
        seconds = [f"{max(searches):.0f}" if searches else "–"]
        seconds.append(f"{statistics.mean(r['training_seconds'] for r in same):.0f}")
        before = str(same[0]["before"])
        rows.append([title, f"{count / 1e6:.1f}M", f"{before} + {epochs}", _mean(best), *seconds])
    header = ["pruned to", "MAdds", "epochs", "test accuracy", "search, s", "training, s"]
    ours, theirs = (data["conversion_seconds"][key] for key in ("dsnet", "ModelOpt"))
    caption = f"conversion: {theirs} s, `dsnet.convert` {ours} s; {ACCURACY}, {MEANS}"
    return markdown(header, rows, f"{source(data)}; {caption}")


def speed_table(files: str) -> str:
    """Tabulate one batch size of several files of `dsnet bench`, beside single networks for all images."""
    results = []
    for file in files.split(","):
        name, batch = file.split("@")
        data = _read(name)
        results.append((data, next(row for row in data["results"] if str(row["batch"]) == batch)))
    (mix,) = {tuple(data["shares"].items()) for data, _ in results}  # one mix, or they cannot be compared
    largest = max(int(route) for route, _ in mix)
    ways = {
        "routed": "gated",
        f"route {largest}": f"alone {largest}",
        "largest route": "full",
        "MobileNetV1": "twin",
        "MobileNetV1 × 0.5": "half",
    }
    timings = [_quartiles(row["times"][way]) for _, row in results for way in ways.values()]
    rows = []
    for data, row in results:
        images = f"{row['batch']:,} image{'s' * (row['batch'] > 1)}"
        routed, *others = (f"{row['times'][way]['median']:.2f}" for way in ways.values())
        rows.append([f"{data['device']}, {_setup(data)}, {images}", routed, f"{row['ideal']:.2f}", *others])
    header = ["machine", *ways]
    header.insert(2, "ideal")
    dates = ", ".join(sorted({data["date"] for data, _ in results}))
    caption = f"{dates}; milliseconds a batch, {spread(timings)}; routed and ideal: {_mix(dict(mix))}"
    return markdown(header, rows, caption)


WEIGHTS = {"scratch": "random", "transfer": "transferred"}
HEADS = {"anew": "new", "transferred": "transferred"}


def transfer_table(name: str, data: Data) -> str:
    """Tabulate networks that start from random weights and from another run, by the gate's routing heads."""
    rows = []
    for weights, heads in dict.fromkeys((run["network"], run["gate"]) for run in data["runs"]):
        same = [run for run in data["runs"] if (run["network"], run["gate"]) == (weights, heads)]
        ends = [list(run["test"].values()) for run in same]
        images: Counter[str] = Counter()
        for run in same:
            images.update(run["gated"]["taken"])
        shares = (f"{route}: {count / images.total():.0%}" for route, count in sorted(images.items()))
        rows.append(
            [
                WEIGHTS[weights],
                HEADS[heads],
                _mean([end[0] for end in ends]),
                _mean([end[-1] for end in ends]),
                _mean([run["gated"]["accuracy"] for run in same]),
                f"{statistics.mean(run['gated']['madds'] for run in same) / 1e6:.1f}M",
                ", ".join(shares),
            ]
        )
    madds = list(data["runs"][0]["madds"].values())
    routes = [f"route {number} ({_millions(madds[number])})" for number in (0, len(madds) - 1)]
    header = ["initial weights", "routing heads", *routes, "gated", "MAdds, gated", "routes, gated"]
    return markdown(header, rows, f"{source(data)}; {ACCURACY}, {MEANS}")


def _millions(madds: float) -> str:
    return f"{madds / 1e6:.0f}M" if madds >= 1e7 else human(round(madds))


def transfer_rates_table(name: str, data: Data, kind: str = "adamw") -> str:
    """Tabulate accuracy at the smallest and the largest route by batch and learning rate, mean over seeds."""
    runs = [run for run in data["runs"] if run["kind"] == kind]
    rates = sorted({run["lr"] for run in runs})
    rows = []
    for batch in sorted({run["batch"] for run in runs}):
        cells = []
        for lr in rates:
            tests = [list(run["test"].values()) for run in runs if (run["batch"], run["lr"]) == (batch, lr)]
            ends = [_only(test[at] for test in tests) for at in (0, -1)] if tests else []
            cells.append(" / ".join(ends))
        rows.append([str(batch), *cells])
    seeds, epochs = len({run["seed"] for run in runs}), runs[0]["epochs"]
    caption = f"{source(data)}; {ACCURACY}, smallest / largest route, {epochs} epochs, mean of {seeds} seeds"
    return markdown(["batch", *(f"{lr:g}" for lr in rates)], rows, caption)


def detection_table(name: str, data: Data, routes: str | None = None) -> str:
    """Tabulate mean average precision of detectors at some routes and gated, with the whole cost."""
    rows = []
    for recipe in dict.fromkeys(run["recipe"] for run in data["runs"]):
        same = [run for run in data["runs"] if run["recipe"] == recipe]
        results = same[0]["results"]
        single = sum(result["route"] is not None for result in results)
        shown = evenly_spaced(single, int(routes or single))
        for index, result in enumerate(results):
            if index < single and index not in shown:
                continue
            others = [run["results"][index] for run in same]
            maps = [
                _mean([100 * r["map"][rule] for r in others], 1) for rule in ("voc2007", "voc2010", "coco")
            ]
            madds = statistics.mean(r["madds"] for r in others)
            route = "gate" if result["route"] is None else str(result["route"])
            rows.append([recipe, route, f"{madds / 1e9:.2f}G", *maps])
    header = ["recipe", "route", "MAdds", "VOC 2007", "VOC 2010", "COCO"]
    return markdown(header, rows, f"{source(data)}; mAP in percent on 72 test images, {MEANS}")


def pretrained_exact_table(name: str, data: Data) -> str:
    """Tabulate the accuracy of pretrained networks and of their conversions' largest routes."""
    rows = [
        [
            row["network"],
            f"{row['side']} px",
            f"{row['images']:,}",
            f"{row['top1']['original']:.2f}",
            f"{row['top1']['converted']:.2f}",
            str(row["differ"]),
            f"{row['largest_error']:.0e}",
        ]
        for row in data["results"]
    ]
    header = [
        "network",
        "size",
        "images",
        "original",
        "largest route",
        "other predictions",
        "largest difference of logits",
    ]
    caption = f"{source(data)}; top-1 accuracy in percent on validation images of ImageNet"
    return markdown(header, rows, caption)


def pretrained_importance_table(name: str, data: Data) -> str:
    """Tabulate the accuracy of routes that were not trained, by the order of their channels."""
    rows = []
    for order in dict.fromkeys(run["order"] for run in data["runs"]):
        same = [run["test"] for run in data["runs"] if run["order"] == order]
        title = order if order in ("unsorted", "weights", "activations") else f"Torch-Pruning: {order}"
        rows.append([title, *(_mean([test[route] for test in same], 1) for route in data["madds"])])
    header = ["order", *(f"route {route} ({_millions(madds)})" for route, madds in data["madds"].items())]
    seeds = len({run["seed"] for run in data["runs"]})
    caption = (
        f"{source(data)}; {data['network']} at {data['side']} px: accuracy in percent on {data['images']:,} "
        f"validation images of Imagenette after re-calibration on {data['calibration']:,} training images, "
        f"without training{f', {MEANS}' if seeds > 1 else ''}; the original network has "
        f"{data['original']:.1f}. 97 % of these images are in ImageNet's training set, so the figures "
        "compare orders only"
    )
    return markdown(header, rows, caption)


def pretrained_latency_table(name: str, data: Data) -> str:
    """Tabulate milliseconds of one image: the original network, and each route alone and in the plan."""

    def cell(way: str) -> str:
        median, low, high = _quartiles(data["times"][way])
        return f"{median:.2f} ({low:.2f}–{high:.2f})"

    whole = data["times"]["original"]["median"]
    rows = [["original network", "", cell("original"), "1.00", ""]]
    for route, madds in data["madds"].items():
        share = data["times"][f"alone {route}"]["median"] / whole
        ways = [cell(f"alone {route}"), f"{share:.2f}", cell(f"plan {route}")]
        rows.append([f"route {route}", _millions(madds), *ways])
    header = ["network", "MAdds", "alone, ms", "alone / original", "in the plan, with the gate, ms"]
    caption = (
        f"{source(data)}, {_threads(data)}, {data['backend']}; {data['network']} at {data['side']} px; "
        f"milliseconds of one image, medians (quartiles) of {data['rounds']} rounds"
    )
    return markdown(header, rows, caption)


def pretrained_starts_table(name: str, data: Data) -> str:
    """Tabulate test accuracy by what fine-tuning starts from."""
    titles = {"voc": "VOC crops", "imagenette": "Imagenette"}
    rows = [
        [
            titles[run["dataset"]],
            run["start"],
            f"{run['lr']:g}",
            *(f"{run['test'][route]:.1f}" for route in "0123"),
        ]
        for dataset in titles
        for run in data["runs"]
        if run["dataset"] == dataset
    ]
    header = ["data", "start", "learning rate", *(f"route {route}" for route in range(4))]
    return markdown(
        header, rows, f"{source(data)}; {ACCURACY}, one seed, 30 epochs, a tenth of the images held out"
    )


def imagenet_cascade_table(name: str, data: Data) -> str:
    """Tabulate pretrained networks alone, and the best cascades of two of them."""
    networks, rows = data["networks"], []
    for number, network in enumerate(networks):
        ms = data["times"][f"alone {number}"]["median"]
        cells = ["", _millions(network["madds"]), "", f"{network['top1']:.1f}", "", f"{ms:.1f}"]
        rows.append([f"{network['title']}, {network['side']} px", *cells])
    for row in data["results"]:
        if row["goal"] == "any pair":
            continue
        first, second, other = (networks[number]["title"] for number in (*row["routes"], row["beside"]))
        low, high = row["ratio_interval"]
        least, most = row["difference_interval"]
        rows.append(
            [
                f"{first} → {second}, {row['goal']} as {other}",
                f"{row['go_on']:.1%}",
                _millions(row["madds"]),
                f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]",
                f"{row['top1']:.1f}",
                f"{row['difference']:+.1f} [{least:+.1f}, {most:+.1f}]",
                f"{row['ms']:.1f}",
            ]
        )
    header = ["network", "go on", "MAdds", "of the network's", "top-1", "difference", "ms"]
    caption = (
        f"{source(data)}, {_threads(data)}, {data['backend']}; accuracy in percent on "
        f"{data['images']['test']:,} validation images of ImageNet, pairs and thresholds from "
        f"{data['images']['calibration']:,} others; in brackets 95 % intervals of a paired bootstrap; "
        "milliseconds of one image: medians of "
        f"{data['rounds']} rounds, of cascades computed (resizing + first + share × second); load "
        f"average {data['load']['before'][0]:.1f} to {data['load']['after'][0]:.1f} on {data['cores']} cores"
    )
    return markdown(header, rows, caption)


def _only(values: Iterable[float]) -> str:
    return f"{statistics.mean(values):.1f}"


def _mean(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)})"


KINDS: dict[str, Callable[..., str]] = {
    "slicing": slicing_table,
    "training": training_table,
    "schemes": schemes_table,
    "calibration": calibration_table,
    "routing": routing_table,
    "gating": gating_table,
    "bench": bench_table,
    "equal-accuracy": equal_accuracy_table,
    "photos": photos_table,
    "modelopt": modelopt_table,
    "transfer": transfer_table,
    "transfer-rates": transfer_rates_table,
    "detection": detection_table,
    "pretrained-exact": pretrained_exact_table,
    "pretrained-importance": pretrained_importance_table,
    "pretrained-latency": pretrained_latency_table,
    "pretrained-starts": pretrained_starts_table,
    "imagenet-cascade": imagenet_cascade_table,
}


def make_table(name: str, chosen: str) -> str:
    """Return the table of one or more JSON files, with all or the chosen rows."""
    if "@" in name:
        return speed_table(name)
    data = _read(name.partition(",")[0])
    return KINDS[data["benchmark"]](name, data, **dict(pair.split("=") for pair in chosen.split()))


def _read(name: str) -> Data:
    data: Data = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return data


def filled(text: str) -> str:
    """Return a page with its tables filled in again."""
    return TABLE.sub(lambda m: m[1] + make_table(m[2], m[3]) + m[4], text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail where a page is out of date"
    )
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        if filled(text) != text:
            stale.append(page)
            if not args.check:
                path.write_text(filled(text), encoding="utf-8")
    print(f"{'out of date' if args.check else 'written'}: {', '.join(stale) or 'nothing'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
