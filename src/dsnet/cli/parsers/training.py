"""``dsnet train``, ``convert``, ``transfer``, ``recalibrate``, ``gate`` and ``demo``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from dsnet.cli.parsers.common import Parser, positive, setting_text
from dsnet.cli.parsers.recipe_names import CLASSIFIERS, recipe_summaries
from dsnet.training.stage2.config import GateConfig

__all__ = ["convert", "demo", "gate", "recalibrate", "train", "transfer"]

CONVERT_OPTIONS = ("widths", "residual", "depths", "gate", "image_size", "num_classes", "table")


def train(parser: Parser) -> None:
    """Train a supernet by a recipe, or on your own images (Stage I).

    Trains a supernet, computes the batch-norm statistics of all its routes, and shows the accuracy of every
    route on the test split. The run's folder holds checkpoints (last, best, final), recipe.json,
    metrics.jsonl, results.json, report.html (what was reached, what to do next) and, where TensorBoard is
    installed, its event files. Ctrl-C and SIGTERM save before they stop; --resume continues. The cost of the
    run is printed before it starts.

    With --data and no recipe the settings follow the data: network, image size, batch, epochs. DIR has one
    folder of images per class, or train/ and test/ with such folders in them. With --model a pretrained
    network is converted into a supernet and fine-tuned.

    Examples:
      dsnet train --data photos                      (photos/CLASS/*.jpg; nothing else is needed)
      dsnet train --data photos --dry-run            (what would be trained, and how long it takes)
      dsnet train --data photos --model timm:resnet18                 (a pretrained start, for few photos)
      dsnet train --data photos --model timm:resnet18 --weights resnet18.safetensors
      dsnet train digits_mbnet
      dsnet train digits_mbnet --set scheme.name=h-ib+mvco --set epochs=30 --out runs/hib
      dsnet train cifar10_mbnet --set data.root=/data --dry-run
      dsnet train cifar10_mbnet --data /data/my-images      (the recipe's settings on other images)
      dsnet train cifar10_mbnet --set scheme.name=label --set scheme.route=0   (stand-alone network)
      dsnet train runs/hib/recipe.json --out runs/again --set seed=1
      torchrun --nproc-per-node 8 -m dsnet train imagenet_ds_mbnet --set data.root=/data
    """
    parser.add_list("Recipes", recipe_summaries(CLASSIFIERS), 31)
    text = "a recipe by name, or the recipe.json of a run; optional with --data"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=text)
    text = "a data set, or a folder of images (default: the recipe's)"
    parser.add_argument("--data", metavar="NAME|DIR", help=text)
    text = (
        "with --data: fine-tune this network, timm:NAME or one that --import registers; it is converted into "
        "a supernet"
    )
    parser.add_argument("--model", metavar="NAME", help=text)
    add_weights(parser)
    parser.add_settings("change a setting; --dry-run shows all of them")
    text = "folder of the run (default: runs/RECIPE, runs/DATA or runs/RECIPE-DATA)"
    parser.add_argument("--out", type=Path, help=text)
    parser.add_resume()
    parser.add_flag("--dry-run", "show the settings, the routes and the cost of the run; train nothing")
    parser.add_json("print the settings (--dry-run) or the results as JSON")
    parser.add_threads()


def add_weights(parser: Parser) -> None:
    """Add ``--weights`` and ``--weights-by-order``."""
    text = (
        "pretrained weights of the network: a safetensors file or a state dict saved by torch.save, timm to "
        "download those of timm, none for random ones (default: timm for timm:NAME, else none)"
    )
    parser.add_argument("--weights", metavar="FILE", help=text)
    text = "take the tensors of FILE by order, for files with other names; all shapes must agree"
    parser.add_flag("--weights-by-order", text)


def convert(parser: Parser) -> None:
    """Convert a pretrained network into a supernet, without training.

    Shows which channels are sliced, what stays whole and why, and the routes; with --out saves the supernet
    as a run. Its largest route computes what the network computes. The others need training (`dsnet train
    --model`): with --data channels are sorted by their activations on these images, and batch-norm statistics
    of the smaller routes are computed, which alone is not enough.

    Examples:
      dsnet convert timm:resnet18 --weights none                            (what would be sliced)
      dsnet convert timm:resnet18 --weights resnet18.safetensors --out runs/resnet18
      dsnet convert timm:resnet50 --set widths=0.5,1 --set residual=0.75,1 --set gate=layer2
      dsnet convert timm:tf_efficientnet_lite0 --weights lite0.pth --weights-by-order --set image_size=128
    """
    text = "timm:NAME, or a network that --import registers"
    parser.add_argument("network", metavar="NETWORK", help=text)
    add_weights(parser)
    parser.add_settings("an option of the conversion: " + ", ".join(CONVERT_OPTIONS))
    parser.add_argument(
        "--data", metavar="NAME|DIR", help="images to sort channels and compute statistics by"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of a run to save the supernet in (default: not saved)"
    )
    parser.add_json("print the groups of channels and the routes as JSON")


def transfer(parser: Parser) -> None:
    """Fine-tune a trained supernet on other data.

    Takes all weights of a run but its classifier, fine-tunes all routes together on other data by the run's
    scheme, computes their batch-norm statistics, and trains a gate like the run's, if it has one: from
    random weights, or from the run's routing heads (--gate-transfer). Image size and normalisation are those
    of the run. Settings are the run's but for the schedule, which is the paper's: 70 epochs, 15 of warm-up.
    Learning rate: for SGD the paper's 0.7 for a batch of 1024, in proportion to the batch; for AdamW the
    run's, times the square root of the ratio of batches (1e-3 for 1024 if the run was trained by SGD). A run
    with an external teacher is fine-tuned by labels, since its teacher knows other classes. --set changes
    all of this.

    Examples:
      dsnet transfer runs/imagenet --data /data/flowers --out runs/flowers
      dsnet transfer runs/digits_mbnet --data my-digits --set optim.epochs=10 --set optim.warmup=1
      dsnet transfer runs/imagenette_mbnet --data cifar10   # resized to the run's 128 pixels
      dsnet transfer runs/imagenet --data /data/flowers --gate-transfer --gate-set epochs=5
    """
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--data", required=True, metavar="NAME|DIR", help="a data set, or a folder of images")
    parser.add_argument("--out", type=Path, help="folder of the new run (default: RUN-DATA)")
    parser.add_settings()
    gates = parser.add_mutually_exclusive_group()
    gates.add_argument("--gate-transfer", action="store_true", help="start from the run's routing heads")
    gates.add_argument("--no-gate", action="store_true", help="train no gate")
    parser.add_settings("change a setting of the gate", "--gate-set")
    parser.add_resume()
    parser.add_threads()


def recalibrate(parser: Parser) -> None:
    """Compute the batch-norm statistics of every route of a checkpoint.

    Every route has its own batch-norm statistics. This computes all of them exactly, in one pass over
    training images, and saves them in the checkpoint. Images are augmented as in training, because the
    weights were trained on such images.

    Example:
      dsnet recalibrate runs/mine --name best --data cifar10 --images 10000
    """
    parser.add_run()
    parser.add_checkpoint()
    parser.add_data("train")
    parser.add_batch(256)
    parser.add_device()
    text = "maximum number of images (default: 10000)"
    parser.add_argument("--images", type=positive, default=10_000, help=text)
    parser.add_flag("--plain", "do not augment the images")
    text = "seed of the choice of images and routes (default: 1)"
    parser.add_argument("--seed", type=positive, default=1, help=text)


def gate(parser: Parser) -> None:
    """Train the gates of a trained supernet (Stage II).

    Gives the network of a run new routing heads and trains them; its weights stay bitwise the same. Saved as
    the checkpoint `gated` of the run. Networks with one gate take seconds: the outputs of the frozen weights
    are kept in memory.

    Examples:
      dsnet gate runs/digits_mbnet                                    the paper's losses
      dsnet gate runs/mine --set goal=value                          scores learn the chance that each
                                                  route is right: what a budget is best spent by
      dsnet gate runs/mine --set space=S --save-as gated-S           the paper's DS-MBNet-S
      dsnet gate runs/resnet --set space=L       DS-ResNet's S, M, L: all routes, other loss weights
      dsnet gate runs/mine --set latency=t.json                      a penalty in milliseconds
    Then: dsnet calibrate RUN, and dsnet evaluate RUN --routed.
    """
    settings = {f"{f.name}={setting_text(f.default)}": f.metadata["about"] for f in fields(GateConfig)}
    parser.add_list("Settings and their defaults", settings, 20)
    parser.add_run()
    parser.add_checkpoint("final, else last")
    text = "checkpoint to write (default: gated)"
    parser.add_argument("--save-as", default="gated", metavar="NAME", help=text)
    parser.add_settings()
    parser.add_device()
    parser.add_resume()
    parser.add_flag("--dry-run", "show the settings; train nothing")
    parser.add_json("print the settings (--dry-run) or the results as JSON")


def demo(parser: Parser) -> None:
    """Route images by a trained network that comes with dsnet, measure the gain, and write a report.

    Takes half a minute to two minutes on two cores; nothing is downloaded. Writes the shipped weights as a
    run, calibrates its cascades on 1,900 images, then runs every route and the cascade at several budgets on
    2,000 other images and measures accuracy and time. The report, one HTML file, leads with the result; the
    folder gets test images as PNG files for `dsnet predict` as well.
    """
    parser.add_argument("--out", type=Path, default=Path("dsnet-demo"), help="folder (default: dsnet-demo)")
    text = "calibrate and measure on at most N images each, for a quick look (default: all)"
    parser.add_argument("--images", type=positive, metavar="N", help=text)
    parser.add_threads()
