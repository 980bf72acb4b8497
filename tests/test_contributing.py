"""The extensions that CONTRIBUTING.md shows work with public names alone, and so do their commands."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dsnet
from dsnet.cli import main
from dsnet.models import registry
from dsnet.routing import policies
from dsnet.runtime.backends import base as backends
from dsnet.training.stage1 import scheme as schemes
from tests.support import assert_close, images, random_model, randomise
from tests.support.docs import ROOT, example_modules

REGISTRIES = (
    (registry, "_REGISTRY"),
    (schemes, "_PARTS"),
    (policies, "_POLICIES"),
    (backends, "_BACKENDS"),
)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports an example from a folder of the user; what it registers ends with the test."""
    for module, name in REGISTRIES:
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    for name, code in example_modules().items():
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return importlib.import_module


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dsnet ")]


@pytest.mark.parametrize("name", example_modules())
def test_examples_use_public_names_only(name: str) -> None:
    for node in ast.walk(ast.parse(example_modules()[name])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsnet"):
            package = importlib.import_module(node.module or "")
            assert {alias.name for alias in node.names} <= set(package.__all__), node.module
        if isinstance(node, ast.Attribute):
            assert node.attr == "__init__" or not node.attr.startswith("_")


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_of_the_examples_run(
    words: list[str], run: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "RUN" in words:
        shutil.copytree(run, "RUN")
        shutil.copytree(Path(files[0]).parent, "photos")
        if words[0] != "calibrate":
            assert main(["calibrate", "RUN", "--import", "careful", "--name", "gated"]) == 0
        words += ["--name", "gated"]
        capsys.readouterr()
    assert main([*words, "--json"]) == 0
    assert capsys.readouterr().out.strip().endswith("}")


def test_every_route_of_the_family_is_the_network_that_extract_returns(
    modules: Callable[[str], ModuleType],
) -> None:
    modules("width_net")
    model = randomise(dsnet.create_model("width_net", dtype=torch.float64)).requires_grad_(False)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    assert model(x).shape == (4, 10)
    for route in model.space:
        net = dsnet.extract(model, route, fold_bn=False)
        assert_close(net(x), model(x, route), 1e-10)
        assert dsnet.params(model, route) == sum(p.numel() for p in net.parameters())


def test_the_scheme_teaches_by_its_own_loss(modules: Callable[[str], ModuleType]) -> None:
    module = modules("squares")
    scheme = dsnet.training.Scheme.parse("squares+mvco")
    assert (scheme.target, scheme.label_share, scheme.own_views) == ("ib", 0.5, True)
    assert scheme.soft_loss is module.squared_difference
    one, other = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
    assert scheme.soft_loss(one, other, 1.0).item() == pytest.approx(2, abs=1e-5)


def test_a_plan_on_the_backend_gives_the_logits_of_the_network(
    modules: Callable[[str], ModuleType],
) -> None:
    modules("channels_last")
    model = random_model("ds_mbnet_tiny")
    x = images(model, 6)
    plan = dsnet.runtime.compile(model, backend="channels_last", device="cpu")
    assert_close(plan(x), model(x), 1e-10)
