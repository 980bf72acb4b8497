"""``dsnet detect``: train, evaluate and use a detector."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, Parser
from dsnet.cli.parsers.recipe_names import DETECTORS, recipe_summaries

__all__ = ["detect"]


def detect(parser: Parser) -> None:
    """Find boxes: train, evaluate and use a detector (FSSD).

    An FSSD detector on a supernet with one gate: every image at its own route.
    """
    commands: Commands = {
        train: "dsnet.cli.detect_train:run",
        evaluate: "dsnet.cli.detect:run_evaluate",
        predict: "dsnet.cli.detect:run_predict",
    }
    parser.add_commands(commands, title="steps", metavar="STEP")


def train(parser: Parser) -> None:
    r"""Train a detector, all routes together, then its gate.

    Trains a detector on a folder in Pascal VOC's layout:
      DIR/JPEGImages/NAME.jpg  DIR/Annotations/NAME.xml  DIR/ImageSets/Main/{trainval,test}.txt
    All routes learn together; then the batch-norm statistics of every route are computed, all routes are
    evaluated on the test split, and a gate is trained. Problems with files are reported before training
    starts. Ctrl-C and SIGTERM save before they stop; --resume continues.

    The bccd recipes fit any folder in this layout: classes are those of its training images. Only the number
    of epochs is chosen for BCCD: fewer images need more of them, many images fewer.

    Examples:
      dsnet detect train bccd_ds_mbnet --data BCCD
      dsnet detect train bccd_ds_mbnet --data my-boxes --dry-run       (images, classes, boxes, steps)
      dsnet detect train bccd_ds_mbnet --data my-boxes --out runs/short \
          --set optim.epochs=5 --set optim.batch=8 --set data.size=160 --set gate.epochs=2
                             (a short run, to see that all works; a batch must not exceed the images)
      dsnet detect train bccd_ds_mbnet --data my-boxes --set data.train=train --set data.test=val
      dsnet detect train bccd_ds_mbnet --data BCCD --set data.classes=RBC,WBC,Platelets
      dsnet detect train bccd_ds_mbnet --data my-boxes --set start=runs/imagenette_mbnet
      dsnet detect train voc_ds_mbnet --data VOCdevkit --dry-run
    """
    parser.add_list("Recipes", recipe_summaries(DETECTORS), 22)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name, or the recipe.json of a run")
    parser.add_argument("--data", metavar="DIR", help="folder in VOC's layout, or one with several of them")
    parser.add_settings("change a setting, lists with commas; --dry-run shows all")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/RECIPE)")
    parser.add_resume()
    parser.add_flag("--dry-run", "show the settings and the size of the data; train nothing")
    parser.add_json("print the settings (--dry-run) or the results as JSON")
    parser.add_threads()


def evaluate(parser: Parser) -> None:
    """Show the mean average precision of every route, and of the gate.

    Mean average precision by the rules of VOC 2007 and 2010 and of COCO, beside the multiply-adds of the
    whole detector.

    Examples:
      dsnet detect evaluate runs/bccd_ds_mbnet --data BCCD
      dsnet detect evaluate runs/bccd_ds_mbnet --data BCCD --split val --routes 0 13 --json
    """
    parser.add_run("dsnet detect train")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder in VOC's layout")
    parser.add_argument("--split", default="test", help="of ImageSets/Main, or FOLDER/SPLIT (default: test)")
    parser.add_argument("--routes", type=int, nargs="+", metavar="N", help="these alone, without the gate")
    parser.add_argument(
        "--problems", type=Path, metavar="FILE.txt", help="write all problems with files here"
    )
    parser.add_batch(32)
    parser.add_device()
    parser.add_json()


def predict(parser: Parser) -> None:
    """Find boxes in image files, every image at its own route.

    Finds boxes in images: as a table, as JSON lines, and as images with the boxes drawn. An image that
    cannot be read, or whose predictions are not finite, is reported; the others are still processed, and the
    exit status is 1.

    Examples:
      dsnet detect predict runs/bccd_ds_mbnet photo.jpg --draw found
      dsnet detect predict runs/bccd_ds_mbnet photos --score 0.5 --out boxes.jsonl
      dsnet detect predict runs/bccd_ds_mbnet photos --route 0 --json | jq '.boxes | length'
    """
    parser.add_run("dsnet detect train")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a file, a folder, or a pattern in quotes")
    parser.add_argument("--route", type=int, metavar="N", help="every image at this route")
    text = "minimum probability of a box (default: 0.3)"
    parser.add_argument("--score", type=float, default=0.3, help=text)
    text = "write images with their boxes into this folder, subfolders kept"
    parser.add_argument("--draw", type=Path, metavar="DIR", help=text)
    parser.add_json("print JSON, one object per line, as results come")
    parser.add_argument("--out", type=Path, metavar="FILE.jsonl", help="write these lines to a file")
    parser.add_flag("--force", "replace existing files")
    parser.add_batch(16)
    parser.add_device()
    parser.add_plan_backend()
