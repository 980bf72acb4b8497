"""``dsnet recalibrate``: exact batch-norm statistics for every route of a checkpoint."""

from __future__ import annotations

from dsnet.cli.parsers.common import Commands, add_parser, add_run_arguments, positive

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "recalibrate",
        "dsnet.cli.recalibrate",
        help="make the batch-norm statistics of every route of a checkpoint",
        description="Batch norms keep statistics of their own for every route. This makes all of them,\n"
        "exactly, from one pass over training images, and saves them in the checkpoint. Images\n"
        "are augmented as in training, because that is what the weights know.",
        epilog="Example:\n  dsnet recalibrate runs/mine --name best --data cifar10 --images 10000",
    )
    add_run_arguments(parser, "train")
    parser.add_argument("--images", type=positive, default=10_000, help="at most so many (default: 10000)")
    parser.add_argument("--plain", action="store_true", help="images as they are, without augmentation")
    parser.add_argument("--seed", type=positive, default=1, help="which images and histories (default: 1)")
