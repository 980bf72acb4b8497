"""Every scheme trains every kind of network on digits: a few here, all of them in the slow target."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dsnet.data.transforms.augment import Augment
from dsnet.training.api import Outcome, train
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.results import read_outcome
from tests.support.stage1 import SCHEMES as STEPS
from tests.support.training import metrics

DATA = DataConfig(name="digits", calibration=512)
SHIFT = Augment(padding=1)  # so that views differ
RUN = RunConfig(device="cpu", validate_every=100)
KINDS = {
    "mbnet": ("ds_mbnet_tiny", {}, OptimConfig(lr=0.2, epochs=12, warmup=1, batch=64)),
    "resnet": ("ds_resnet_tiny", {}, OptimConfig(lr=0.5, epochs=10, warmup=1, batch=64)),
    "vit": (
        "ds_vit_plus_tiny",
        {},
        OptimConfig(kind="adamw", lr=2e-3, weight_decay=0.05, epochs=16, warmup=1, batch=64),
    ),
}
SCHEMES = (*STEPS, "single")
# Test accuracy at the smallest and the largest route, in percent: one seed, one thread.
REACHED = {
    ("mbnet", "label"): (93.0, 99.2),
    ("mbnet", "single"): (91.1, 98.6),
    ("mbnet", "id"): (96.9, 98.1),
    ("mbnet", "ib"): (96.4, 98.3),
    ("mbnet", "e-ib"): (95.0, 98.9),
    ("mbnet", "h-ib"): (90.8, 98.6),
    ("mbnet", "e-ib+h-ib"): (90.5, 98.6),
    ("mbnet", "ib+mvco"): (96.9, 98.3),
    ("mbnet", "h-ib+mvco"): (88.6, 98.1),
    ("mbnet", "id+label"): (93.6, 98.3),
    ("mbnet", "ib+label"): (95.5, 98.6),
    ("mbnet", "ed"): (94.7, 98.6),
    ("mbnet", "ed+mvco"): (90.5, 99.2),
    ("resnet", "label"): (92.2, 95.8),
    ("resnet", "single"): (90.0, 91.9),
    ("resnet", "id"): (71.6, 79.1),
    ("resnet", "ib"): (82.7, 91.9),
    ("resnet", "e-ib"): (85.2, 94.2),
    ("resnet", "h-ib"): (82.7, 94.2),
    ("resnet", "e-ib+h-ib"): (78.3, 94.2),
    ("resnet", "ib+mvco"): (81.3, 91.4),
    ("resnet", "h-ib+mvco"): (83.8, 94.4),
    ("resnet", "id+label"): (69.9, 78.3),
    ("resnet", "ib+label"): (93.3, 96.9),
    ("resnet", "ed"): (93.0, 96.9),
    ("resnet", "ed+mvco"): (95.8, 98.1),
    ("vit", "label"): (76.0, 81.1),
    ("vit", "single"): (74.9, 75.5),
    ("vit", "id"): (30.4, 30.4),
    ("vit", "ib"): (77.2, 85.0),
    ("vit", "e-ib"): (76.3, 83.8),
    ("vit", "h-ib"): (77.4, 85.8),
    ("vit", "e-ib+h-ib"): (76.9, 85.5),
    ("vit", "ib+mvco"): (77.4, 85.0),
    ("vit", "h-ib+mvco"): (72.4, 85.2),
    ("vit", "id+label"): (29.0, 35.4),
    ("vit", "ib+label"): (79.4, 86.9),
    ("vit", "ed"): (69.9, 77.2),
    ("vit", "ed+mvco"): (85.0, 89.1),
}
SLACK = 8.0  # percent, for other processors and versions
QUICK = [("mbnet", "h-ib+mvco")]
TEACHER = ("mbnet", "label")
OTHERS = [pair for pair in itertools.product(KINDS, SCHEMES) if pair not in (*QUICK, TEACHER)]


def config(kind: str, scheme: str, teacher: Path | None, epochs: int | None = None) -> TrainConfig:
    model, options, optim = KINDS[kind]
    data = DATA
    if epochs is not None:
        data = DataConfig(name="digits", calibration=128)
        optim = OptimConfig(kind=optim.kind, lr=optim.lr, epochs=epochs, warmup=0.5, batch=128)
    named = SchemeConfig(
        name=scheme, alpha=0.97, random=2, teacher=str(teacher) if scheme.startswith("ed") else None
    )
    return TrainConfig(
        model=model, options=options, data=data, augment=SHIFT, scheme=named, optim=optim, run=RUN
    )


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    train(config("mbnet", "label", None), folder)
    return folder


def ends(outcome: Outcome) -> tuple[float, float]:
    """Test accuracy of the smallest and the largest route, in percent."""
    return 100 * outcome.test[0].accuracy, 100 * outcome.test[-1].accuracy


def assert_trains(kind: str, scheme: str, teacher: Path, folder: Path) -> None:
    assert_reaches(train(config(kind, scheme, teacher), folder), kind, scheme)


def assert_reaches(outcome: Outcome, kind: str, scheme: str) -> None:
    for ours, reached in zip(ends(outcome), REACHED[kind, scheme], strict=True):
        assert ours > reached - SLACK


@pytest.mark.parametrize(("kind", "scheme"), QUICK)
def test_a_pair_trains(kind: str, scheme: str, teacher: Path, tmp_path: Path) -> None:
    assert_trains(kind, scheme, teacher, tmp_path)


def test_the_teacher_trains(teacher: Path) -> None:
    outcome = read_outcome(teacher)
    assert outcome is not None
    assert_reaches(outcome, *TEACHER)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scheme"), OTHERS)
def test_every_other_pair_trains(kind: str, scheme: str, teacher: Path, tmp_path: Path) -> None:
    assert_trains(kind, scheme, teacher, tmp_path)


@pytest.mark.parametrize(("kind", "scheme"), [pair for pair in OTHERS if pair[0] != "resnet"])
def test_a_pair_makes_ten_steps(kind: str, scheme: str, teacher: Path, tmp_path: Path) -> None:
    outcome = train(config(kind, scheme, teacher, epochs=1), tmp_path)
    assert outcome.status.steps == 10
    (line,) = metrics(tmp_path, "train")
    role = "route" if scheme == "single" else "largest"
    assert 0 < line[f"{role}/label"] < 3  # a mean over ten steps; guessing pays 2.3
    assert all(0 <= result.accuracy <= 1 for result in outcome.test)
