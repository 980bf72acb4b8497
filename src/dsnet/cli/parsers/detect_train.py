"""``dsnet detect train``: a detector with all its routes, and its gate."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser
from dsnet.cli.parsers.recipe_names import detector_recipes

__all__ = ["add_detect_train"]


def add_detect_train(commands: Commands) -> None:
    """Add ``dsnet detect train``."""
    names = "\n".join(f"  {name:22}{summary}" for name, summary in detector_recipes().items())
    parser = add_parser(
        commands,
        "train",
        "dsnet.cli.detect_train",
        help="train a detector, all routes together, then its gate",
        description="Trains a detector on a folder in Pascal VOC's layout:\n"
        "  DIR/JPEGImages/NAME.jpg  DIR/Annotations/NAME.xml  DIR/ImageSets/Main/{trainval,test}.txt\n"
        "All routes learn together; then the statistics of every route are made, all routes are evaluated\n"
        "on the test split, and a gate is trained. What is wrong with files is told before training starts.\n"
        "Ctrl-C and SIGTERM save before they stop; --resume goes on.\n\n"
        "The bccd recipes fit any folder in this layout: classes are those of its training images. Only the\n"
        "number of epochs is made for BCCD: fewer images need more of them, many images fewer.\n\n"
        "Recipes:\n" + names,
        epilog="Examples:\n"
        "  dsnet detect train bccd_ds_mbnet --data BCCD\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --dry-run       (images, classes, boxes, steps)\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --out runs/short \\\n"
        "      --set optim.epochs=5 --set optim.batch=8 --set data.size=160 --set gate.epochs=2\n"
        "                         (a short run, to see that all works; a batch must not exceed the images)\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --set data.train=train --set data.test=val\n"
        "  dsnet detect train bccd_ds_mbnet --data BCCD --set data.classes=RBC,WBC,Platelets\n"
        "  dsnet detect train bccd_ds_mbnet --data my-boxes --set start=runs/imagenette_mbnet\n"
        "  dsnet detect train voc_ds_mbnet --data VOCdevkit --dry-run",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name, or the recipe.json of a run")
    parser.add_argument("--data", metavar="DIR", help="folder in VOC's layout, or one with several of them")
    parser.add_settings("change a setting, lists with commas; --dry-run shows all")
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/RECIPE)")
    parser.add_flag("--resume", "continue from the folder's last checkpoint")
    parser.add_flag("--dry-run", "show the settings and the size of the data; train nothing")
    parser.add_json("print the settings (--dry-run) or the results as JSON")
