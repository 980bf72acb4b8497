"""``dsnet bench``: what routing saves on this machine."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import BACKENDS, ROUTERS, Commands, add_parser, image_size, positive
from dsnet.cli.stage_progress import seconds_of

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "bench",
        "dsnet.cli.bench",
        help="what routing saves on this machine, beside ideal stand-alone networks",
        description="Times mixed batches, in which every image takes its own route, side by side with\n"
        "everyone at the largest route, with what others do (masking, indexing), with slicing\n"
        "without a plan, with ideal stand-alone networks in the same mix, with a cascade, and\n"
        "with the static network that one would take instead. Weights do not matter, so a\n"
        "model by name will do.",
        epilog="Examples:\n"
        "  dsnet bench ds_mbnet --routes S --quick\n"
        "  dsnet bench ds_mbnet --routes S --backend openvino --batch 1 16 --time-limit 10m\n"
        "  dsnet bench ds_mbnet_cifar --device cuda --precision bfloat16 --batch 64 256 1024\n"
        "  dsnet bench ds_resnet_cifar --set bn_key=stage --batch 8\n"
        "  dsnet bench runs/cifar10_mbnet --mix measured --budget 45% --plot bench.html\n"
        '  dsnet bench runs/cifar10_mbnet --mix mix.json --json     (mix.json: {"0": 0.7, "13": 0.3})',
    )
    parser.add_argument(
        "network", metavar="MODEL|RUN", help="a supernet (`dsnet models` lists them), or the folder of a run"
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", metavar="N", help="default: 1 8 64 (--quick: 1 8)"
    )
    parser.add_argument(
        "--mix",
        default="uniform",
        metavar="uniform|measured|FILE",
        help="measured: what the run's calibrated router takes at --budget; a JSON file: shares by route "
        "(default: uniform, over 32 drawn ones where there are more)",
    )
    parser.add_argument("--budget", metavar="COST", help="for --mix measured: 300M, 45%%, 5ms")
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        default="auto",
        help="for --mix measured; auto: the more accurate one at the budget (default: auto)",
    )
    parser.add_argument(
        "--routes", metavar="S|0,3,7", help="what the gate decides between (default: what it does already)"
    )
    parser.add_argument(
        "--backend",
        choices=["auto", *BACKENDS],
        default="auto",
        help="default: auto, the fastest here",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="default: the network's own")
    parser.add_argument("--memory", choices=["packed", "shared"], default="packed", help="default: packed")
    parser.add_argument(
        "--buckets",
        type=positive,
        nargs="+",
        metavar="N",
        help="batch sizes that programs are made for (default: the backend's own)",
    )
    parser.add_argument("--repeats", type=positive, metavar="N", help="rounds (default: 20; --quick: 3)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: batches of 1 and 8, few rounds, programs for these alone, no ways without a "
        "plan (masking, indexing, slicing)",
    )
    parser.add_argument(
        "--time-limit",
        type=seconds_of,
        metavar="TIME",
        help="90, 90s, 5m, 1h: end then with what was measured, and say what is missing (default: no limit)",
    )
    parser.add_argument("--image-size", type=image_size, metavar="N", help="height and width")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the model; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="theory, ideal and measured as a picture (.svg or .html)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
