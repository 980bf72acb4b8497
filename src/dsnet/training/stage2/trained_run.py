"""Runs of Stage I as the starting point of gates and routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dsnet.core.checkpoint import Checkpoint
from dsnet.core.device import pick_device
from dsnet.core.distributed.ranks import ALONE, Ranks
from dsnet.data.dataset import ImageDataset
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import build_network, load_classifier
from dsnet.routing.cost_table import CostTable
from dsnet.routing.latency import LatencyTable
from dsnet.training.api import load_data, split_data
from dsnet.training.callbacks import Callback
from dsnet.training.config import TrainConfig
from dsnet.training.run_dir import locked, settings_of
from dsnet.training.stage1.teacher import Channels

__all__ = ["TrainedRun", "lock_run", "open_trained"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedRun:
    """A run of Stage I: its network, and the images as it split them."""

    folder: Path
    saved: Checkpoint
    config: TrainConfig
    model: Supernet
    channels: Channels
    train: ImageDataset
    held_out: ImageDataset
    test: ImageDataset

    def seen(self, images: ImageDataset, batch: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of normalised images and labels, all in order, without augmentation."""
        for x, labels in images.epoch(batch):
            yield normalise(x, *self.channels), labels

    def costs(self, latency: str | Path | None = None) -> tuple[CostTable, LatencyTable | None]:
        """Return the costs of the network's segments, and the latency table that they come from, if any.

        Args:
            latency: File of a latency table whose milliseconds are the costs (default: multiply-adds).
        """
        if latency is None:
            return CostTable.of_model(self.model, self.test.size), None
        table = LatencyTable.load(latency)
        table.check(self.model, self.model.head.classifier.weight.device, self.test.size)
        return table.costs(), table

    def halves(self, seed: int) -> tuple[ImageDataset, ImageDataset]:
        """Split the held-out images into those to train gates on and those to evaluate them on.

        Raises:
            DsnetError: One of them would be empty.
        """
        learnt, judged = self.held_out.hold_out(0.5, seed=seed)
        if not len(learnt) or not len(judged):
            raise DsnetError(
                f"images=held_out splits {len(self.held_out)} images into {len(learnt)} to train on and "
                f"{len(judged)} to evaluate on: use images=train, or hold out more"
            )
        return learnt, judged

    def calibration_images(self) -> ImageDataset:
        """Return the held-out images that neither the network nor its gates were trained on."""
        gate = self.saved.data.get("gate")
        if isinstance(gate, dict) and gate.get("images") == "held_out":
            return self.halves(int(gate.get("seed", 0)))[1]
        return self.held_out


def open_trained(
    folder: str | Path, name: str | None = None, *, device: str = "auto", callback: Callback | None = None
) -> TrainedRun:
    """Load a run's checkpoint with the data that it was trained on.

    Args:
        folder: Folder of the run.
        name: Name of the checkpoint (default: that of `load_checkpoint`).
        device: Device of the network and the images, or ``auto``.
        callback: Gets warnings.

    Raises:
        DsnetError: The run was not made by `train`, trained one route alone, or held no images out.
    """
    folder, callback = Path(folder), callback or Callback()
    if (folder / "checkpoint.json").exists():
        raise DsnetError(f"{folder} is a checkpoint; name its run: {folder.parent}")
    saved = load_classifier(folder, name)
    recipe, known = saved.data.get("recipe"), saved.data.get("input")
    if not isinstance(recipe, dict) or known is None:
        raise DsnetError(f"{folder} does not say what it was trained on: `dsnet train` did not make it")
    if saved.data.get("route") is not None:
        raise DsnetError(
            f"{folder} was trained at route {saved.data['route']} only: it has no routes to choose from"
        )
    config = settings_of(TrainConfig, recipe, f"{folder}: recipe")
    model = build_network(saved)
    everything, test = load_data(config, model)
    train, held_out = split_data(config, everything, callback)
    if held_out is None:
        raise DsnetError(
            f"{folder} held no images out (data.hold_out={config.data.hold_out}); routers need some that "
            "Stage I has not seen: train it again with data.hold_out=0.1"
        )
    torch_device = pick_device(device)
    return TrainedRun(
        folder=folder,
        saved=saved,
        config=config,
        model=model.to(torch_device),
        channels=(tuple(known["mean"]), tuple(known["std"])),
        train=train.to(torch_device),
        held_out=held_out.to(torch_device),
        test=test.to(torch_device),
    )


def lock_run(folder: Path, ranks: Ranks = ALONE) -> AbstractContextManager[None]:
    """Lock a run; a folder that does not exist is reported when it is opened."""
    return locked(folder) if ranks.first and folder.is_dir() else nullcontext()
