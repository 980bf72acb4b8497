"""Predictions for image files equal those of the network; plans, preparation and errors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import dsnet
from dsnet.data.transforms.augment import normalise
from dsnet.inference.classify import Predictor, open_predictor
from dsnet.models import Supernet
from dsnet.routing import CascadePolicy
from dsnet.runtime.partition import builders
from dsnet.runtime.plan import Plan
from dsnet.training import load_model, save_checkpoint
from tests.support import error_of
from tests.support.image_files import picture as noise
from tests.support.image_files import resized_then_cropped
from tests.support.routed_run import COUNT, picture, predicted

pytestmark = pytest.mark.xdist_group("predict")

CHANNELS = {"mean": [0.5] * 3, "std": [0.2] * 3}


def seen(predictor: Predictor, digits: Tensor) -> Tensor:
    return normalise(digits, *predictor.preprocessing[1:3])


CHOSEN: list[dict[str, Any]] = [
    {"budget": "45%", "router": "cascade"},
    {"budget": "45%"},
    {"budget": "45%", "router": "gate"},
    {"budget": 200_000},
    {"router": "gate"},
    {},
    {"name": "fresh"},
    {"name": "final", "route": 2},
    {"name": "ms", "budget": "2.5ms"},
]


@pytest.mark.parametrize("chosen", CHOSEN, ids=str)
def test_predictions_equal_the_network_at_the_reported_route(
    run: Path, files: list[str], digits: Tensor, chosen: dict[str, Any]
) -> None:
    predictor = open_predictor(run, **chosen, device="cpu")
    results = predicted(predictor, files, batch=7, top=3)
    assert [result.path for result in results] == files
    model, x = load_model(run, chosen.get("name")), seen(predictor, digits)
    for result, image in zip(results, x, strict=True):
        shares = model(image[None], result.route)[0].softmax(0).sort(descending=True)
        assert [answer.label for answer in result.answers] == shares.indices[:3].tolist()
        assert [answer.probability for answer in result.answers] == pytest.approx(
            shares.values[:3].tolist(), abs=1e-5
        )
        assert [answer.name for answer in result.answers] == [str(n) for n in shares.indices[:3].tolist()]
    routes = {result.route for result in results}
    single = (
        isinstance(predictor.policy, CascadePolicy) and len(predictor.policy.routes) == 1
    )  # auto may take it
    assert routes == {2} if "route" in chosen else len(routes) > 1 or single or "budget" not in chosen


@pytest.mark.parametrize("router", ["auto", "gate", "cascade"])
def test_routes_and_costs_equal_those_of_the_router(
    run: Path, files: list[str], digits: Tensor, router: str
) -> None:
    routed = dsnet.load(run, "gated").routed("45%", router=router)
    predictor = open_predictor(run, budget="45%", router=router, device="cpu")
    results = predicted(predictor, files, batch=COUNT)
    with torch.no_grad():
        taken = routed.run(seen(predictor, digits)).routes.tolist()
    assert [result.route for result in results] == taken
    prefix = routed.router.costs.prefix
    for result in results:
        assert result.routes == routed.path(result.route)
        own = [dsnet.madds(routed.model, route) for route in result.routes]
        assert result.cost == routed.cost(result.route) == sum(own) - prefix * (len(own) - 1)
    assert (max(len(result.routes) for result in results) > 1) == (routed.router.kind == "cascade")


def test_without_a_budget_the_gates_decide(run: Path, files: list[str], digits: Tensor) -> None:
    for name in ("gated", "fresh"):
        predictor = open_predictor(run, name=name, device="cpu")
        choices = predictor.model.route(seen(predictor, digits))[:, 0].tolist()
        assert [result.route for result in predicted(predictor, files)] == choices


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("chosen", [{"budget": "45%"}, {"router": "gate"}, {"route": 2}], ids=str)
def test_predictions_run_on_a_plan(
    run: Path, files: list[str], digits: Tensor, backend: str, chosen: dict[str, Any]
) -> None:
    """A plan gives the routes and logits of the network; eager compiles it without timing anything."""
    pytest.importorskip("torch" if backend == "eager" else backend)
    timing = "dsnet.runtime.partition.builders.time_interleaved"
    with mock.patch(timing, wraps=builders.time_interleaved) as measured:
        predictor = open_predictor(run, **chosen, device="cpu", backend=backend)
    assert bool(measured.call_count) == (backend != "eager")
    assert isinstance(predictor.plan, Plan)
    assert predictor.plan.network.backend == backend
    assert predictor.plan.network.memory == ("shared" if backend == "eager" else "packed")
    network = dsnet.load(run)
    assert isinstance(network, dsnet.Classifier)
    x = seen(predictor, digits)
    expected = network.routed(**chosen).run(x) if "route" not in chosen else None
    with mock.patch.object(Supernet, "run_route", side_effect=AssertionError("not by the plan")):
        results = predicted(predictor, files, batch=9)
    if expected is not None:
        assert [result.route for result in results] == expected.routes.tolist()
        logits = expected.logits
    else:
        logits = network.model(x, chosen["route"])
    for result, row in zip(results, logits.softmax(1), strict=True):
        assert result.best.probability == pytest.approx(row.max().item(), abs=1e-4)


def test_every_kind_of_image_is_read_alike(run: Path, digits: Tensor, tmp_path: Path) -> None:
    rgb = picture(digits[3])
    grey, clear = rgb.convert("L"), rgb.convert("RGBA")
    clear.putalpha(grey.point(lambda value: 255 - value))  # what it hides counts as well
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    kinds = {"rgb.png": rgb, "grey.png": grey, "clear.png": clear, "deep.png": deep, "raw.ppm": rgb}
    kinds |= {"palette.png": grey.convert("P"), "lossless.tif": rgb, "no_suffix": rgb}
    for name, image in kinds.items():
        image.save(tmp_path / name, format="png" if name == "no_suffix" else None)
    modes = set()
    for name in kinds:
        with Image.open(tmp_path / name) as image:
            modes.add(image.mode)
    assert modes == {"RGB", "L", "RGBA", "I;16", "P"}
    results = predicted(open_predictor(run, route=3, device="cpu"), [str(tmp_path / n) for n in kinds])
    assert len({result.answers for result in results}) == 1, results


def test_images_of_other_sizes_are_resized_and_cut(run: Path, digits: Tensor, tmp_path: Path) -> None:
    """The shorter side becomes 16, the middle of the longer one is kept."""
    wide = picture(torch.cat([digits[0], digits[1], digits[2]], dim=2)).resize((72, 24))
    wide.save(tmp_path / "wide.png")
    predictor = open_predictor(run, route=3, device="cpu")
    (result,) = predicted(predictor, [str(tmp_path / "wide.png")])
    centre = np.asarray(wide.resize((48, 16), Image.Resampling.BICUBIC))[:, 16:32]
    logits = predictor.model(seen(predictor, torch.from_numpy(centre.copy()).permute(2, 0, 1)[None]), 3)
    assert result.best.probability == pytest.approx(logits.softmax(1).max().item(), abs=1e-5)
    assert result.best.label == logits.argmax()


def saved(folder: Path, name: str, **data: object) -> Path:
    save_checkpoint(folder, "final", dsnet.create_model(name), step=1, data={"input": CHANNELS, **data})
    return folder


def test_size_and_class_names_come_from_the_run(tmp_path: Path) -> None:
    def opened(name: str, **data: object) -> Predictor:
        return open_predictor(saved(tmp_path, name, **data), route=0, device="cpu")

    assert opened("ds_mbnet_tiny").preprocessing.size == 16
    larger = opened("ds_mbnet_tiny", input={**CHANNELS, "size": 32})
    assert larger.preprocessing.size == 32
    assert larger.policy.cost(larger.model.space, 0) == dsnet.madds(larger.model, 0, 32)
    assert opened("ds_mbnet_cifar").preprocessing.size == 32
    assert opened("ds_mbnet_tiny").classes == tuple(map(str, range(10)))
    assert opened("ds_mbnet_tiny", classes=list("abcdefghij")).classes == tuple("abcdefghij")
    assert "3 names for the 10 classes" in error_of(lambda: opened("ds_mbnet_tiny", classes=list("abc")))
    assert "nearest that runs" in error_of(lambda: opened("ds_mbnet_tiny", input={**CHANNELS, "size": 17}))
    assert "normalised" in error_of(lambda: opened("ds_mbnet_tiny", input=None))


def test_images_are_cropped_as_the_run_says(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(noise(7))
    for ratio, shorter, data in ((0.5, 32, {"crop_ratio": 0.5}), (1.0, 16, {})):
        predictor = open_predictor(
            saved(tmp_path, "ds_mbnet_tiny", input={**CHANNELS, **data}), route=0, device="cpu"
        )
        assert predictor.preprocessing.crop_ratio == ratio  # 1 where an earlier version made the run
        pixels = torch.from_numpy(resized_then_cropped(path.read_bytes(), 16, shorter).copy())[None]
        expected = predictor.model(seen(predictor, pixels), 0).softmax(1).max().item()
        (result,) = predicted(predictor, [str(path)])
        assert result.best.probability == pytest.approx(expected, abs=1e-6)
    for wrong in (0, 2, "x", None):
        bad = {**CHANNELS, "crop_ratio": wrong}
        assert "crop_ratio is " in error_of(partial(saved, tmp_path, "ds_mbnet_tiny", input=bad))


def test_a_run_trained_at_one_route_uses_it(tmp_path: Path, files: list[str]) -> None:
    folder = saved(tmp_path, "ds_mbnet_tiny", route=2)
    assert {r.route for r in predicted(open_predictor(folder, device="cpu"), files)} == {2}
    assert {r.route for r in predicted(open_predictor(folder, route=2, device="cpu"), files)} == {2}
    for wrong in ({"route": 1}, {"budget": "45%"}, {"router": "cascade"}):
        message = error_of(lambda wrong=wrong: open_predictor(folder, **wrong, device="cpu"))
        assert "route 2 alone" in message


def test_a_route_without_statistics_is_an_error(tmp_path: Path) -> None:
    model = dsnet.create_model("ds_mbnet_tiny").train()
    model(torch.rand(4, 3, 16, 16), 0)
    save_checkpoint(tmp_path, "final", model, step=1, data={"input": CHANNELS})
    assert open_predictor(tmp_path, route=0, device="cpu")
    assert "dsnet recalibrate" in error_of(lambda: open_predictor(tmp_path, route=1, device="cpu"))
