"""``dsnet transfer``: a trained supernet for other data, routers included."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "transfer",
        "dsnet.cli.transfer",
        help="fine-tune a trained supernet on other data",
        description="Takes all weights of a run but its classifier, fine-tunes all routes together on other\n"
        "data by the run's own scheme, makes their batch-norm statistics, and trains a gate like the run's,\n"
        "if it has one: anew, or from the run's routing heads (--gate-transfer). Image size and\n"
        "normalisation are those of the run. Settings are the run's but for the schedule, which is the\n"
        "paper's: 70 epochs, 15 of warm-up. Learning rate: for SGD the paper's 0.7 for a batch of 1024, in\n"
        "proportion to the batch; for AdamW the run's own, times the square root of the ratio of batches\n"
        "(1e-3 for 1024 if the run was trained by SGD). A run with an external teacher is fine-tuned by\n"
        "labels, since its teacher knows other classes. --set changes all of this.",
        epilog="Examples:\n"
        "  dsnet transfer runs/imagenet --data /data/flowers --out runs/flowers\n"
        "  dsnet transfer runs/digits_mbnet --data my-digits --set optim.epochs=10 --set optim.warmup=1\n"
        "  dsnet transfer runs/imagenette_mbnet --data cifar10   # resized to the run's 128 pixels\n"
        "  dsnet transfer runs/imagenet --data /data/flowers --gate-transfer --gate-set epochs=5",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--data", required=True, metavar="NAME|DIR", help="a data set, or a folder of images")
    parser.add_argument("--out", type=Path, help="folder of the new run (default: RUN-DATA)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be repeated"
    )
    gates = parser.add_mutually_exclusive_group()
    gates.add_argument("--gate-transfer", action="store_true", help="begin with the run's routing heads")
    gates.add_argument("--no-gate", action="store_true", help="train no gate")
    parser.add_argument(
        "--gate-set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the gate"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
