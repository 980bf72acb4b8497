"""``dsnet gate``: Stage II, a trained supernet's gates learn to decide."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser, plain
from dsnet.training.stage2.config import GateConfig

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    settings = "\n".join(
        f"  {f'{f.name}={plain(f.default)}':20}{f.metadata['about']}" for f in fields(GateConfig)
    )
    parser = add_parser(
        commands,
        "gate",
        "dsnet.cli.gate",
        help="train the gates of a trained supernet (Stage II)",
        description="Gives the network of a run new routing heads and trains them; its weights do not\n"
        "change by a bit. Saved as the checkpoint `gated` of the run. Networks with one gate take\n"
        "seconds: what the frozen weights say of the images is kept in memory.\n\n"
        "Settings and their defaults:\n" + settings,
        epilog="Examples:\n"
        "  dsnet gate runs/digits_mbnet                                    the paper's losses\n"
        "  dsnet gate runs/mine --set goal=value                          scores learn the chance that each\n"
        "                                              route is right: what a budget is best spent by\n"
        "  dsnet gate runs/mine --set space=S --save-as gated-S           the paper's DS-MBNet-S\n"
        "  dsnet gate runs/resnet --set space=L       DS-ResNet's S, M, L: all routes, other loss weights\n"
        "  dsnet gate runs/mine --set latency=t.json                      a penalty in milliseconds\n"
        "Then: dsnet calibrate RUN, and dsnet evaluate RUN --routed.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as `dsnet train` makes it")
    parser.add_argument("--name", help="which of its checkpoints to start from (default: final, else last)")
    parser.add_argument(
        "--save-as", default="gated", metavar="NAME", help="checkpoint to write (default: gated)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--resume", action="store_true", help="go on with training that was stopped")
    parser.add_argument("--dry-run", action="store_true", help="show the settings; train nothing")
    parser.add_argument("--json", action="store_true", help="the settings (--dry-run) or the results as JSON")
