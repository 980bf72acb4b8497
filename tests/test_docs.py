"""What README and docs say is what the code does."""

from __future__ import annotations

import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tables import PAGES, filled

import dsnet
from dsnet.cli import build_parser
from dsnet.core.settings import keys_of
from dsnet.recipes.resolve import resolve_recipe
from dsnet.report.text import human
from dsnet.training.config import TrainConfig
from tests.support.docs import ROOT, code_blocks


def test_the_readmes_ten_lines_run_and_print_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks("README.md")
    statements = [line for line in block.splitlines() if line.strip()]
    assert len(statements) <= 10
    names: dict[str, object] = {}
    with torch.no_grad():
        exec(block, names)
    assert names["logits"].shape == (8, 1000)
    assert names["routes"].shape == (8, 1)
    printed = capsys.readouterr().out.splitlines()
    promised = [said.split(", by")[0] for said in re.findall(r"print\(.*?# (.*)$", block, re.M)]
    assert printed == promised


def test_the_design_pages_code_runs() -> None:
    model = dsnet.create_model("ds_mbnet_cifar")
    names = {"model": model, "images": torch.randn(2, 3, 32, 32), "route": 3}
    for block in code_blocks("docs/design.md"):
        with torch.no_grad():
            exec(block, names)
    assert names["first"].shape == names["second"].shape == (2, 10)
    assert model.gate(0).choices == (0, 1, 2, 3)


def test_the_plan_of_the_docs_runs() -> None:
    (block,) = code_blocks("docs/runtime.md")
    names: dict[str, object] = {}
    exec(block, names)
    assert names["logits"].shape == (32, 10)
    assert names["answer"].index == 31


def test_the_training_pages_run_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    short, block = code_blocks("docs/training.md")
    exec(short, {})
    accuracies = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(accuracies) == 4
    assert (tmp_path / "runs" / "python" / "final").exists()
    assert "epochs, batch = 20, 64" in block
    exec(block.replace("epochs, batch = 20, 64", "epochs, batch = 2, 64"), {})
    accuracies = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(accuracies) == 4
    assert max(accuracies) > 0.5
    assert (tmp_path / "runs" / "digits" / "last").exists()


def test_the_training_pages_commands_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every ``dsnet train`` that README and docs show can be resolved; every setting they name exists."""
    known = {key for key, _ in keys_of(TrainConfig)}
    for page in ("README.md", "docs/training.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for line in re.findall(r"^(?:torchrun .* -m )?dsnet train (\w+)(.*?)(?:#|$)", text, re.M):
            settings = re.findall(r"--set (\S+)", line[1])
            assert resolve_recipe(line[0], settings).model
        for setting in re.findall(r"`(?:--set )?((?:data|augment|mix|scheme|optim|run)\.\w+)[=`]", text):
            assert setting in known, setting


def test_the_readmes_models_are_the_models() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("ds_mbnet", "ds_mbnet_plus", "ds_resnet", "ds_resnet_plus", "ds_vit_plus"):
        model = dsnet.create_model(name, device="meta")
        ends = [human(dsnet.madds(model, r)) for r in (model.space.smallest, model.space.largest)]
        (row,) = re.findall(rf"^\| `{name}` \| (\d+).*\| (.*) – (.*) \|$", text, re.M)
        assert row == (str(len(model.space)), *ends)


@pytest.mark.parametrize("page", PAGES)
def test_tables_match_the_committed_figures(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert filled(text) == text, "run `python -m benchmarks.tables`"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_functions_and_classes_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"(?<![\w./-])dsnet(?:\.[A-Za-z_]\w*)+(?=\()", text):
        assert pkgutil.resolve_name(name) is not None


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("make demo") < text.index("make test") < text.index("## Ten lines")


def commands_of(page: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("dsnet ")]


def test_the_readmes_commands_follow_from_each_other() -> None:
    """Every command is one, and every run and image that it reads was made by one before it."""
    made = {"build/demo/supernet", "build/demo/images"}  # by `make demo`
    given = {"photos", "more-photos", "more", "BCCD"}  # of the reader; described beside the command
    read = 0
    parser = build_parser()
    for _, *words in commands_of("README.md"):
        if "--help" in words:
            continue
        args = parser.parse_args(words)  # leaves with an error where an argument is wrong
        if "train" in words[:2]:
            made.add(str(args.out or f"runs/{args.recipe}"))
        for path in re.findall(r"(?:runs|build)/[\w/]+", " ".join(words)):
            read += path not in made or "train" not in words[:2]
            assert path in made, f"nothing before `dsnet {' '.join(words)}` makes {path}"
        images = getattr(args, "images", None) or [getattr(args, "data", None)]
        assert all(image is None or image in made or image.split("/")[0] in given for image in images), words
    assert read >= 7


def test_the_commands_on_pretrained_networks_are_commands() -> None:
    commands = commands_of("docs/pretrained.md")
    assert len(commands) >= 10
    for _, *words in commands:
        build_parser().parse_args(words)  # leaves with an error where an argument is wrong


def test_a_network_of_ones_own_is_converted_as_shown() -> None:
    (block,) = (block for block in code_blocks("docs/pretrained.md") if "dsnet.convert(" in block)
    names: dict[str, Any] = {}
    exec(block, names)
    assert [size.groups for size in names["model"].space.smallest.stages] == [(32,), (32, 64)]


def test_make_demo_says_how_to_go_on() -> None:
    """The Makefile's last words are the README's first command on what the demo leaves behind."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    first = next(words for words in commands_of("README.md") if "build/demo/supernet" in words)
    assert " ".join(first) in makefile
    assert ". $(BIN)/activate" in makefile
