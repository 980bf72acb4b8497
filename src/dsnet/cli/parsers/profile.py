"""``dsnet profile``: how long every route of a network, or of a plan of it, takes on this machine."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import BACKENDS, Commands, add_parser, image_size, positive

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "profile",
        "dsnet.cli.profile",
        help="time every route of a network on this machine, for budgets in milliseconds",
        description="Times a network's parts on this machine: what runs before the first gate, and what\n"
        "runs behind every choice of every gate. A route's time is the sum of its parts'. The\n"
        "file that --out writes is a table of latencies, by which budgets can be given in\n"
        "milliseconds; it holds for this network on this device and backend. --backend other\n"
        "than eager times a plan, as `dsnet.runtime.compile` makes it: take what you will serve\n"
        "with. Weights do not matter, so a model by name will do.",
        epilog="Examples:\n"
        "  dsnet profile ds_mbnet\n"
        "  dsnet profile ds_mbnet_cifar --set num_classes=100 --batch 1 8 64\n"
        "  dsnet profile runs/digits_mbnet --threads 1 --out latency.json\n"
        "  dsnet profile runs/mine --backend openvino --out openvino.json\n"
        "  dsnet profile ds_resnet --device cuda --batch 32 --image-size 160 --json",
    )
    parser.add_argument(
        "network", metavar="MODEL|RUN", help="a supernet (`dsnet models` lists them), or the folder of a run"
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1], metavar="N", help="batch sizes (default: 1)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument(
        "--backend",
        choices=["eager", "auto", *(name for name in BACKENDS if name != "eager")],
        default="eager",
        help="eager: the network itself; others: a plan; auto: of the fastest backend here (default: eager)",
    )
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="default: the network's own")
    parser.add_argument(
        "--repeats", type=positive, default=30, metavar="N", help="times each part is timed (default: 30)"
    )
    parser.add_argument(
        "--image-size",
        type=image_size,
        metavar="N",
        help="height and width (default: what the run was trained at, or the model is made for)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the model, as create_model takes it; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the table of latencies here")
    parser.add_argument("--json", action="store_true", help="print the table of latencies as JSON")
