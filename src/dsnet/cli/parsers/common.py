"""The parser class, with the arguments that several commands take."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, cast

from dsnet.errors import printable, shorten

__all__ = [
    "BACKENDS",
    "SETS",
    "Commands",
    "Parser",
    "image_size",
    "positive",
    "seconds",
    "setting_text",
    "threads",
]

# Copies of lists in modules that import torch; a test compares them.
SETS = (
    "cifar10",
    "cifar100",
    "digits",
    "digits_0_to_6",
    "digits_7_to_9",
    "fashion_mnist",
    "fashion_mnist_sample",
    "imagenet",
    "imagenette",
    "voc_crops",
)
BACKENDS = ("eager", "cudagraphs", "inductor", "triton", "onnxruntime", "openvino")


class Parser(argparse.ArgumentParser):
    """An argument parser with the arguments that commands share; its errors print on any terminal."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        super().error(printable(message, 1000))

    def add_commands(self, commands: Commands, *, title: str, metavar: str) -> None:
        """Add subcommands.

        Args:
            commands: Functions that add the arguments of a command to its parser, each with the
                ``module:function`` that runs the command; None if it has subcommands instead. The function's
                docstring is the help: a summary line, a description, and examples.
            title: Heading of the list of commands.
            metavar: What a command is called in the usage line.
        """
        parsers = self.add_subparsers(title=title, metavar=metavar, required=True)
        for describe, target in commands.items():
            summary, _, text = inspect.cleandoc(describe.__doc__ or "").partition("\n\n")
            description, *examples = re.split(r"\n\n(?=Examples?:)", text)
            parser = parsers.add_parser(
                describe.__name__,
                help=summary[:1].lower() + summary[1:].rstrip("."),
                description=description,
                epilog="\n".join(examples),
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            if target is not None:
                parser.add_import("import_after")
                # A program that runs a command by itself, not through `main`, keeps its number of threads.
                parser.set_defaults(run_command=_deferred(target), keep_threads=True)
            describe(parser)

    def add_list(self, title: str, items: Mapping[str, str], width: int) -> None:
        """Add a list of names with explanations to the description."""
        lines = "\n".join(f"  {name:{width}}{text}" for name, text in items.items())
        self.description = f"{self.description}\n\n{title}:\n{lines}"

    def add_import(self, dest: str) -> None:
        """Add ``--import``; before and after the command it needs a ``dest`` of its own."""
        self.add_argument(
            "--import",
            dest=dest,
            action="append",
            default=[],
            metavar="MODULE",
            help="import this module first, so that the models, backends and recipes it registers are known; "
            "the current folder is searched; may be repeated",
        )

    def add_threads(self) -> None:
        """Add ``--threads``, the number of CPU threads or ``auto``."""
        self.add_argument(
            "--threads",
            type=threads,
            metavar="N|auto",
            help="CPU threads; auto: the fastest number by a short measurement (default: OMP_NUM_THREADS, "
            "else auto; a resumed run keeps its own)",
        )

    def add_device(self) -> None:
        """Add ``--device`` and ``--threads``."""
        self.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
        self.add_threads()

    def add_run(self, command: str = "dsnet train") -> None:
        """Add the folder of a run."""
        self.add_argument("run", type=Path, metavar="RUN", help=f"folder of a run of `{command}`")

    def add_network(self) -> None:
        """Add a model by name or the folder of a run, with the options of a network that is timed."""
        text = "a supernet (`dsnet models` lists them), or the folder of a run"
        self.add_argument("network", metavar="MODEL|RUN", help=text)
        self.add_settings("an option of the model, as create_model takes it")
        text = "height and width (default: that of the run's training, else the model's)"
        self.add_argument("--image-size", type=image_size, metavar="N", help=text)
        text = "number format (default: the network's)"
        self.add_argument("--precision", choices=["float32", "bfloat16"], help=text)
        self.add_device()

    def add_checkpoint(self, default: str = "gated, else final, else last") -> None:
        """Add ``--name`` of a checkpoint."""
        self.add_argument("--name", help=f"checkpoint: gated, final, best or last (default: {default})")

    def add_data(self, split: str) -> None:
        """Add ``--data`` and ``--root``: the data that a checkpoint is used on."""
        self.add_argument(
            "--data",
            help=f"{', '.join(SETS)}, or a folder with {split}/CLASS/*.jpg; the {split} split is used "
            "(default: the run's training data)",
        )
        text = "folder of named data sets (default: as in the run, else DSNET_DATA)"
        self.add_argument("--root", help=text)

    def add_batch(self, default: int) -> None:
        """Add ``--batch``, the size of a batch."""
        self.add_argument("--batch", type=positive, default=default, help=f"batch size (default: {default})")

    def add_plan_backend(self) -> None:
        """Add ``--backend`` of the plan that predicts."""
        text = f"backend of the plan: {', '.join(BACKENDS)}, or auto, which times them; all but eager take "
        text += "time to compile and are faster for many images (default: eager)"
        self.add_argument("--backend", default="eager", metavar="NAME", help=text)

    def add_settings(self, text: str = "change a setting", option: str = "--set") -> None:
        """Add ``--set KEY=VALUE``, which changes one setting and may be repeated."""
        text += "; may be repeated"
        self.add_argument(option, action="append", default=[], metavar="KEY=VALUE", help=text)

    def add_json(self, text: str = "print JSON") -> None:
        """Add ``--json``, which prints the result as JSON in place of tables."""
        self.add_flag("--json", text)

    def add_resume(self) -> None:
        """Add ``--resume``, which continues a run from its last checkpoint."""
        self.add_flag("--resume", "continue from the folder's last checkpoint")

    def add_flag(self, option: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(option, action="store_true", help=text)


Commands = Mapping[Callable[[Parser], None], str | None]


def _deferred(target: str) -> Callable[[argparse.Namespace], int]:
    module, _, function = target.partition(":")

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


def setting_text(value: object) -> str:
    """Format a setting's value as ``--set`` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
