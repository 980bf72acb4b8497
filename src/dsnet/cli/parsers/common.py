"""The parser class, with the arguments that several commands take. Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, cast

from dsnet.errors import printable, shorten

__all__ = [
    "BACKENDS",
    "ROUTERS",
    "SETS",
    "Commands",
    "Parser",
    "add_parser",
    "image_size",
    "plain",
    "positive",
    "seconds",
    "threads",
]

# Copies of lists in modules that import torch; a test compares them.
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

NEWEST = "gated, else final, else last"


class Parser(argparse.ArgumentParser):
    """An argument parser with the arguments that commands share; its errors print on any terminal."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        super().error(printable(message, 1000))

    def add_import(self, dest: str) -> None:
        """``--import``; before and after the command it needs a ``dest`` of its own."""
        self.add_argument(
            "--import",
            dest=dest,
            action="append",
            default=[],
            metavar="MODULE",
            help="import this module first, so that the models, backends and recipes it registers are known; "
            "the current folder is searched; may be repeated",
        )

    def add_run(self, command: str = "dsnet train") -> None:
        """The folder of a run."""
        self.add_argument("run", type=Path, metavar="RUN", help=f"folder of a run of `{command}`")

    def add_network(self) -> None:
        """A model by name or the folder of a run, with options of the model and an image size."""
        text = "a supernet (`dsnet models` lists them), or the folder of a run"
        self.add_argument("network", metavar="MODEL|RUN", help=text)
        self.add_settings("an option of the model, as create_model takes it")
        text = "height and width (default: that of the run's training, else the model's)"
        self.add_argument("--image-size", type=image_size, metavar="N", help=text)
        self.add_argument(
            "--precision", choices=["float32", "bfloat16"], help="number format (default: the network's)"
        )

    def add_checkpoint(self, default: str = NEWEST) -> None:
        """``--name`` of a checkpoint."""
        self.add_argument("--name", help=f"checkpoint: gated, final, best or last (default: {default})")

    def add_data(self, split: str) -> None:
        """``--data`` and ``--root``: the data that a checkpoint is used on."""
        self.add_argument(
            "--data",
            help=f"{', '.join(SETS)}, or a folder with {split}/CLASS/*.jpg; the {split} split is used "
            "(default: the run's training data)",
        )
        self.add_argument(
            "--root", help="folder of named data sets (default: as in the run, else DSNET_DATA)"
        )

    def add_batch(self, default: int) -> None:
        """``--batch``."""
        self.add_argument("--batch", type=positive, default=default, help=f"batch size (default: {default})")

    def add_device(self) -> None:
        """``--device``."""
        self.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")

    def add_settings(self, text: str, option: str = "--set") -> None:
        """``--set KEY=VALUE``."""
        self.add_argument(
            option, action="append", default=[], metavar="KEY=VALUE", help=f"{text}; may be repeated"
        )

    def add_json(self, text: str = "print JSON") -> None:
        """``--json``."""
        self.add_argument("--json", action="store_true", help=text)

    def add_flag(self, option: str, text: str) -> None:
        """An option without a value."""
        self.add_argument(option, action="store_true", help=text)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_parser(
    commands: Commands,
    name: str,
    module: str,
    *,
    function: str = "run",
    computes: bool = True,
    **options: Any,  # noqa: ANN401  (argparse's own)
) -> Parser:
    """Add a command and return its parser.

    Args:
        commands: The subparsers to add it to.
        name: Name of the command.
        module: Module of the function, imported when the command runs.
        function: Function that runs the command.
        computes: Whether the command takes ``--threads``.
        options: Further arguments of argparse, for example ``help`` and ``description``.
    """
    parser = commands.add_parser(name, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
    parser.add_import("import_after")
    if computes:
        parser.add_argument(
            "--threads",
            type=threads,
            metavar="N|auto",
            help="CPU threads; auto: the fastest number by a short measurement (default: with --resume "
            "that of the run, else OMP_NUM_THREADS, else auto)",
        )
    # A program that runs a command by itself, not through `main`, keeps its number of threads.
    parser.set_defaults(run_command=_deferred(module, function), computes=computes, keep_threads=True)
    return parser


def _deferred(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        return cast(int, getattr(importlib.import_module(module), function)(args))

    return run


def positive(text: str) -> int:
    """Parse an integer from 1 to 2³¹."""
    number = int(text)
    if not 1 <= number <= 2**31:
        raise ValueError(text)
    return number


def image_size(text: str) -> int | tuple[int, int]:
    """Parse ``224`` or ``224x192`` (height × width)."""
    sides = tuple(map(positive, text.split("x")))
    if len(sides) == 1:
        return sides[0]
    height, width = sides
    return height, width


def threads(text: str) -> int | str:
    """Parse a number of threads, or ``auto``."""
    return text if text == "auto" else positive(text)


# What argparse calls them in an error.
positive.__name__ = "positive number"
image_size.__name__ = "image size"
threads.__name__ = "number of threads (or auto)"


def seconds(text: str) -> float:
    """Parse ``90``, ``90s``, ``1.5m`` or ``1h`` as seconds."""
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a time such as 90, 90s, 1.5m or 1h, got {shorten(text)}")
    return value


def plain(value: object) -> str:
    """Format a setting's value as ``--set`` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
