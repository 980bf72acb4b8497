"""Short training runs and what watches them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from dsnet.data.transforms.augment import Augment
from dsnet.training.callbacks import Callback
from dsnet.training.config import DataConfig, MixConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.evaluation import RouteResult

OPTIM = OptimConfig(lr=0.1, epochs=2, warmup=0.5, batch=256)  # 5 steps an epoch


BUSY = TrainConfig(
    data=DataConfig(name="digits", calibration=256),
    augment=Augment(padding=1, flip=True, erase=0.2),
    mix=MixConfig(mixup=0.2, cutmix=1.0),
    scheme=SchemeConfig(name="e-ib+h-ib+mvco", alpha=0.9, smoothing=0.1, dropout=0.1),
    optim=OPTIM,
    run=RunConfig(log_every=3, device="cpu"),
)


CONFIGS = {
    "mbnet": BUSY,
    "resnet": replace(
        BUSY, model="ds_resnet_tiny", scheme=SchemeConfig(name="label", random=1, drop_path=0.2)
    ),
    "vit": replace(
        BUSY,
        model="ds_vit_plus_tiny",
        scheme=SchemeConfig(name="ib+label", start=0.3, drop_path=0.1),
        optim=replace(OPTIM, kind="adamw", lr=1e-3, clip=1.0),
        run=replace(BUSY.run, keep="average"),
    ),
    "joint": replace(BUSY, scheme=SchemeConfig(name="label", joint="reinforce")),
}


class StopAt(Callback):
    """Sends this process a signal after a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number

    def on_step_end(self, step: int, epoch: int, images: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), self.number)


class Listen(Callback):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.values: list[Mapping[str, float]] = []
        self.results: list[Sequence[RouteResult]] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        self.values.append(values)

    def on_validation_end(self, step: int, epoch: int, results: Sequence[RouteResult]) -> None:
        self.results.append(results)


def metrics(folder: Path, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


SHORT = TrainConfig(
    data=DataConfig(name="digits", calibration=256),
    scheme=SchemeConfig(name="label"),
    optim=OptimConfig(epochs=1, batch=256),
    run=RunConfig(device="cpu"),
)
