"""``dsnet profile`` and ``bench``: how long routes take, and what routing saves, on this machine."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import BACKENDS, Parser, positive, seconds

__all__ = ["bench", "profile"]


def profile(parser: Parser) -> None:
    """Time every route of a network on this machine, for budgets in milliseconds.

    Times a network's segments on this machine: the prefix before the first gate, and the segments of every
    choice of every gate. A route's time is the sum over its segments. --out writes a latency table, by which
    budgets can be given in milliseconds; it holds for this network on this device and backend. --backend
    other than eager times a plan, as `dsnet.runtime.compile` makes it: take the backend that will serve.
    Weights do not matter, so a model by name will do.

    Examples:
      dsnet profile ds_mbnet
      dsnet profile ds_mbnet_cifar --set num_classes=100 --batch 1 8 64
      dsnet profile runs/digits_mbnet --threads 1 --out latency.json
      dsnet profile runs/mine --backend openvino --out openvino.json
      dsnet profile ds_resnet --device cuda --batch 32 --image-size 160 --json
    """
    parser.add_network()
    text = "batch sizes (default: 1)"
    parser.add_argument("--batch", type=positive, nargs="+", default=[1], metavar="N", help=text)
    plans = ", ".join(name for name in BACKENDS if name != "eager")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default="eager",
        help=f"eager: the network itself; others time a plan: auto (the fastest backend here), {plans}, "
        "or one that --import registers (default: eager)",
    )
    text = "timings of each segment (default: 30)"
    parser.add_argument("--repeats", type=positive, default=30, metavar="N", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the latency table to this file")
    parser.add_json("print the latency table as JSON")


def bench(parser: Parser) -> None:
    """Measure what routing saves on this machine, beside ideal stand-alone networks.

    Times mixed batches, in which every image takes its own route, side by side with all images at the
    largest route, with masking and indexing as others do it, with slicing without a plan, with ideal
    stand-alone networks in the same mix, with a cascade, and with the static network that one would use
    instead. Weights do not matter, so a model by name will do.

    Examples:
      dsnet bench ds_mbnet --routes S --quick
      dsnet bench ds_mbnet --routes S --backend openvino --batch 1 16 --time-limit 10m
      dsnet bench ds_mbnet_cifar --device cuda --precision bfloat16 --batch 64 256 1024
      dsnet bench ds_resnet_cifar --set bn_key=stage --batch 8
      dsnet bench runs/cifar10_mbnet --mix measured --budget 45% --plot bench.html
      dsnet bench runs/cifar10_mbnet --mix mix.json --json     (mix.json: {"0": 0.7, "13": 0.3})
    """
    parser.add_network()
    text = "batch sizes (default: 1 8 64; with --quick: 1 8)"
    parser.add_argument("--batch", type=positive, nargs="+", metavar="N", help=text)
    parser.add_argument(
        "--mix",
        default="uniform",
        metavar="uniform|measured|FILE",
        help="measured: the routes that the run's calibrated router takes at --budget; a JSON file: shares "
        "by route (default: uniform, over a sample of 32 where there are more)",
    )
    parser.add_argument("--budget", metavar="COST", help="for --mix measured: 300M, 45%%, 5ms")
    text = "for --mix measured; auto: the more accurate one at the budget (default: auto)"
    parser.add_argument("--router", metavar="NAME", default="auto", help=text)
    text = "candidate routes of the gate (default: those of the checkpoint)"
    parser.add_argument("--routes", metavar="S|0,3,7", help=text)
    parser.add_argument(
        "--backend",
        metavar="NAME",
        default="auto",
        help=f"backend of the plan: {', '.join(BACKENDS)}, or one that --import registers (default: auto, "
        "the fastest here)",
    )
    text = "weights of the plan (default: packed)"
    parser.add_argument("--memory", choices=["packed", "shared"], default="packed", help=text)
    text = "batch sizes to compile programs for (default: the backend's)"
    parser.add_argument("--buckets", type=positive, nargs="+", metavar="N", help=text)
    text = "rounds of measurements (default: 20; with --quick: 3)"
    parser.add_argument("--repeats", type=positive, metavar="N", help=text)
    parser.add_flag(
        "--quick",
        "about a minute: batches of 1 and 8, few rounds, programs for these sizes alone, no baselines "
        "without a plan (masking, indexing, slicing)",
    )
    text = "90, 90s, 5m, 1h: stop then, and report what is missing (default: no limit)"
    parser.add_argument("--time-limit", type=seconds, metavar="TIME", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the results to this file")
    text = "plot theory, ideal and measured time (.svg or .html)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=text)
    parser.add_json("print the results as JSON")
