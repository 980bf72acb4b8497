"""Every scheme trains every kind of network on digits: a few here, all of them in the slow target."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsnet.data.augment import Augment
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.run import Outcome, train
from tests.training.test_loop import Listen, metrics

DATA = DataConfig(name="digits", calibration=512)
SHIFT = Augment(padding=1)  # so that views differ
RUN = RunConfig(device="cpu", validate_every=100)
KINDS = {
    "mbnet": ("ds_mbnet_tiny", {}, OptimConfig(lr=0.2, epochs=12, warmup=1, batch=64)),
    "resnet": ("ds_resnet_tiny", {"bn_key": "prefix"}, OptimConfig(lr=0.5, epochs=10, warmup=1, batch=64)),
    "vit": (
        "ds_vit_plus_tiny",
        {},
        OptimConfig(kind="adamw", lr=2e-3, weight_decay=0.05, epochs=16, warmup=1, batch=64),
    ),
}
SCHEMES = (
    "label",
    "single",
    "id",
    "ib",
    "e-ib",
    "h-ib",
    "e-ib+h-ib",
    "ib+mvco",
    "h-ib+mvco",
    "id+label",
    "ib+label",
    "ed",
    "ed+mvco",
)
QUICK = {
    ("mbnet", "label"),
    ("mbnet", "e-ib"),
    ("mbnet", "h-ib+mvco"),
    ("vit", "ed+mvco"),
    ("resnet", "ib"),
}
PAIRS = [(kind, scheme) for kind in KINDS for scheme in SCHEMES]


def config(kind: str, scheme: str, teacher: Path | None, epochs: int | None = None) -> TrainConfig:
    model, options, optim = KINDS[kind]
    if epochs is not None:
        optim = OptimConfig(kind=optim.kind, lr=optim.lr, epochs=epochs, warmup=0.5, batch=128)
    named = SchemeConfig(
        name=scheme, alpha=0.97, random=2, teacher=str(teacher) if scheme.startswith("ed") else None
    )
    return TrainConfig(
        model=model, options=options, data=DATA, augment=SHIFT, scheme=named, optim=optim, run=RUN
    )


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    train(config("mbnet", "label", None), folder)
    return folder


def ends(outcome: Outcome) -> tuple[float, float]:
    """Test accuracy of the smallest and the largest route, in percent."""
    return 100 * outcome.test[0].accuracy, 100 * outcome.test[-1].accuracy


@pytest.mark.parametrize(("kind", "scheme"), [pair for pair in PAIRS if pair not in QUICK])
def test_a_pair_makes_ten_steps(kind: str, scheme: str, teacher: Path, tmp_path: Path) -> None:
    outcome = train(config(kind, scheme, teacher, epochs=1), tmp_path)
    assert outcome.ending.steps == 10
    (line,) = metrics(tmp_path, "train")
    role = "route" if scheme == "single" else "largest"
    assert 0 < line[f"{role}/label"] < 3  # a mean over ten steps; guessing pays 2.3
    assert all(0 <= result.accuracy <= 1 for result in outcome.test)
