"""What the parsers of several commands share. Nothing here imports torch: help and errors come at once."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

from dsnet.errors import printable

__all__ = [
    "BACKENDS",
    "ROUTERS",
    "SETS",
    "Commands",
    "Parser",
    "add_import_argument",
    "add_parser",
    "add_run_arguments",
    "image_size",
    "plain",
    "positive",
    "threads",
]

# Copies of what modules that import torch know; a test compares them.
SETS = (
    "digits",
    "cifar10",
    "cifar100",
    "fashion_mnist",
    "digits_0_to_6",
    "digits_7_to_9",
    "imagenette",
    "imagenet",
)
BACKENDS = ("eager", "cudagraphs", "inductor", "triton", "onnxruntime", "openvino")
ROUTERS = ("auto", "gate", "cascade", "single")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors can be printed on any terminal."""

    def error(self, message: str) -> NoReturn:
        """Prints usage and message and ends the process with status 2."""
        super().error(printable(message, 1000))


Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(
    commands: Commands,
    name: str,
    module: str,
    *,
    function: str = "run",
    computes: bool = True,
    **options: Any,  # noqa: ANN401  (argparse's own)
) -> argparse.ArgumentParser:
    """Adds a command whose ``function`` lies in ``module``, which is imported when the command runs.

    A command that ``computes`` takes ``--threads``.
    """
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
    add_import_argument(parser, "import_after")
    if computes:
        parser.add_argument(
            "--threads",
            type=threads,
            default=None,
            metavar="N|auto",
            help="threads of the CPU; auto: the fastest number by a short measurement (default: with "
            "--resume that of the run, else OMP_NUM_THREADS, else auto)",
        )
    # A program that runs a command by itself, not by `main`, keeps its number of threads.
    parser.set_defaults(run_command=_deferred(module, function), computes=computes, keep_threads=True)
    return parser


def add_import_argument(parser: argparse.ArgumentParser, dest: str) -> None:
    """Adds ``--import``; before and after the command it needs names of its own."""
    parser.add_argument(
        "--import",
        dest=dest,
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first, so that the models and recipes it registers are known; "
        "the current folder is searched; may be repeated",
    )


def _deferred(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        return cast(int, getattr(importlib.import_module(module), function)(args))

    return run


def positive(text: str) -> int:
    """A positive integer, for argparse."""
    number = int(text)
    if not 1 <= number <= 2**31:
        raise ValueError(text)
    return number


positive.__name__ = "positive number"  # what argparse calls it in an error


def image_size(text: str) -> int | tuple[int, int]:
    """``224`` or ``224x192`` (height × width), for argparse."""
    sides = tuple(map(positive, text.split("x")))
    if len(sides) == 1:
        return sides[0]
    height, width = sides
    return height, width


image_size.__name__ = "image size"


def threads(text: str) -> int | str:
    """A number of threads, or ``auto``, for argparse."""
    return text if text == "auto" else positive(text)


threads.__name__ = "number of threads (or auto)"


def plain(value: object) -> str:
    """A setting's value as ``--set`` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def add_run_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """A run's folder, which of its checkpoints, and the data of a split."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as `dsnet train` makes it")
    parser.add_argument(
        "--name",
        help="which of its checkpoints: gated, final, best, last (default: gated, else final, else last)",
    )
    parser.add_argument(
        "--data",
        help=f"{', '.join(SETS)}, or a folder with {split}/CLASS/*.jpg; the {split} split is used "
        "(default: what the run was trained on)",
    )
    parser.add_argument("--root", help="where named sets lie (default: as in the run, else DSNET_DATA)")
    parser.add_argument("--batch", type=positive, default=256, help="images at a time (default: 256)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
