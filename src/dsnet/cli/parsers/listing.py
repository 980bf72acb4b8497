"""``dsnet models``, ``weights``, ``describe`` and ``recipes``, which run no network."""

from __future__ import annotations

from dsnet.cli.parsers.common import Parser, image_size
from dsnet.counts import CONVENTIONS

__all__ = ["describe", "models", "recipes", "weights"]


def models(parser: Parser) -> None:
    """List the models.

    Lists the supernets, and the static networks to compare them with. Multiply-adds are counted as in the
    paper, at the model's default image size.

    Any of them by name:
      model = dsnet.create_model('ds_mbnet', num_classes=1000)
    """
    parser.add_argument("--kind", choices=("supernet", "twin"), help="only these (default: all)")
    parser.add_json("print JSON, with the options of every model")


def describe(parser: Parser) -> None:
    """Show a network's routes, with sizes, multiply-adds and parameters.

    Shows the routes of a supernet, cheapest first: the sizes of its dynamic stages, multiply-adds for one
    image and parameters of the stand-alone network of that route. Counting is arithmetic: nothing runs and
    no weights are allocated.

    Examples:
      dsnet describe ds_mbnet
      dsnet describe ds_vit_plus --image-size 384 --convention all
      dsnet describe ds_resnet --all
      dsnet describe ds_mbnet_cifar --set num_classes=100 --json
    """
    parser.add_argument("name", metavar="NAME", help="a model; `dsnet models` lists them")
    text = "height and width (default: the model's)"
    parser.add_argument("--image-size", type=image_size, metavar="N", help=text)
    text = "paper: convolutions, linear layers, average pools; all: also routing heads and attention products"
    parser.add_argument("--convention", choices=CONVENTIONS, default="paper", help=f"{text} (default: paper)")
    parser.add_settings("an option of the model, as create_model takes it")
    parser.add_flag("--all", "every route (default: a sample where there are more than 32)")
    parser.add_json("print every route as JSON")


def recipes(parser: Parser) -> None:
    """List the training recipes: command, duration, accuracy to expect.

    Lists the recipes of `dsnet train` and `dsnet detect train`, or describes one.

    Examples:
      dsnet recipes
      dsnet recipes cifar10_mbnet --json
    """
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one (default: all)")
    parser.add_json("print JSON, with all settings")


def weights(parser: Parser) -> None:
    """List the trained weights that come with the package.

    Shows the network, the images, the accuracy of the smallest and the largest route, size, licence, SHA-256
    and the recipe that trained them. `dsnet demo` writes them as a run.

    Examples:
      dsnet weights
      dsnet weights --json
    """
    parser.add_json("print JSON, with the accuracy of every route")
