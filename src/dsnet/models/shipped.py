"""Trained weights that come with the package.

Each lies in a folder of its own, ``shipped/NAME``: ``model.safetensors`` with the tensors, ``card.json`` with
what they are and how they were made, and their licence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.files import sha256_of
from dsnet.core.formats import SHIPPED
from dsnet.core.schema import read_json
from dsnet.errors import DsnetError, shorten

__all__ = ["ShippedWeights", "list_shipped", "load_shipped", "shipped_weights"]

FOLDER = Path(__file__).parent / "shipped"
AGAIN = "the installation is damaged: install the package again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedWeights:
    """What is known of weights that come with the package.

    Attributes:
        name: Name of the weights.
        summary: What they are, in a line.
        data: The images that they were trained on.
        accuracy: Share of the images of ``tested_on`` that each route gets right, by route number.
        tested_on: The images of ``accuracy``.
        license: Licence of the weights.
        recipe: Name of the recipe that trained them.
        made: Commit and machine of the training, with its duration.
        sha256: SHA-256 of the file of the tensors.
        folder: Folder of the files.
        checkpoint: Plain data of a checkpoint of these weights: network, image preparation, class names.
    """

    name: str
    summary: str
    data: str
    accuracy: tuple[float, ...]
    tested_on: str
    license: str
    recipe: str
    made: str
    sha256: str
    folder: Path
    checkpoint: dict[str, Any]

    @property
    def network(self) -> str:
        """Name of the network."""
        return str(self.checkpoint["network"]["name"])

    @property
    def file(self) -> Path:
        """The file of the tensors."""
        return self.folder / "model.safetensors"

    @property
    def bytes(self) -> int:
        """Size of the file of the tensors.

        Raises:
            DsnetError: It is missing.
        """
        try:
            return self.file.stat().st_size
        except OSError:
            raise DsnetError(f"{self.file} is missing; {AGAIN}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data (JSON types), without that of the checkpoint."""
        return {
            "name": self.name,
            "summary": self.summary,
            "network": self.network,
            "options": self.checkpoint["network"]["options"],
            "data": self.data,
            "accuracy": list(self.accuracy),
            "tested_on": self.tested_on,
            "bytes": self.bytes,
            "license": self.license,
            "sha256": self.sha256,
            "recipe": self.recipe,
            "made": self.made,
            "file": str(self.file),
        }


def list_shipped() -> list[str]:
    """Return the names of the weights that come with the package, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/card.json"))


def shipped_weights(name: str) -> ShippedWeights:
    """Return what is known of weights that come with the package.

    Raises:
        DsnetError: There are none of this name, or their card is damaged.
    """
    folder = FOLDER / name
    card = read_json(
        folder / "card.json",
        SHIPPED,
        missing=f"no weights named {shorten(name)} come with this package; "
        f"it has {', '.join(list_shipped()) or 'none'}",
    )
    facts = {
        key: card[key] for key in ("summary", "data", "tested_on", "license", "recipe", "made", "sha256")
    }
    return ShippedWeights(
        name=name, folder=folder, accuracy=tuple(card["accuracy"]), checkpoint=card["checkpoint"], **facts
    )


def load_shipped(name: str) -> Checkpoint:
    """Load weights that come with the package, as a checkpoint.

    Raises:
        DsnetError: There are none of this name, or their file is missing or damaged.

    Examples:
        >>> from dsnet.models.loading import build_network
        >>> build_network(load_shipped("fashion_mnist_resnet")).name
        'ds_resnet_plus_tiny'
    """
    weights = shipped_weights(name)
    try:
        if weights.bytes and sha256_of(weights.file) != weights.sha256:
            raise DsnetError(f"the SHA-256 of {weights.file} differs from the one in card.json; {AGAIN}")
        tensors = load_file(weights.file)
    except (OSError, SafetensorError) as error:
        raise DsnetError(f"{weights.file} cannot be read ({error}); {AGAIN}") from error
    return Checkpoint(tensors={"model": tensors}, data={**weights.checkpoint, "groups": ["model"]})
