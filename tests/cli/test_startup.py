"""Imports of the command line: help without torch, modules of the user, unexpected errors."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.cli import main
from dsnet.cli.parsers import common
from dsnet.cli.parsers.recipe_names import CLASSIFIERS, DETECTORS, recipe_summaries
from dsnet.data import list_datasets
from dsnet.detection.train.config import DetectionConfig
from dsnet.models.loading import build_network
from dsnet.recipes import list_recipes
from dsnet.runtime import list_backends
from dsnet.training import save_checkpoint
from tests.support.docs import example_modules

COMMANDS = [
    ["--help"],
    ["--version"],
    *(
        [name, "--help"]
        for name in ("models", "describe", "recipes", "train", "convert", "transfer", "recalibrate")
    ),
    *([name, "--help"] for name in ("gate", "calibrate", "evaluate", "predict", "profile", "bench", "demo")),
    *(["detect", name, "--help"] for name in ("train", "evaluate", "predict")),
    ["bench", "x", "--batch", "0"],
    ["nothing"],
    [],
]


def python(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=120
    )


def test_help_and_wrong_arguments_do_not_import_torch() -> None:
    done = python(
        "import sys\n"
        "from dsnet.cli import main\n"
        f"for command in {COMMANDS!r}:\n"
        "    try:\n"
        "        main(command)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    heavy = {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("show this help message") == 18


def test_importing_dsnet_does_not_import_torch_until_a_name_is_used() -> None:
    done = python(
        "import sys, dsnet\n"
        "assert 'create_model' in dir(dsnet) and 'runtime' in dir(dsnet)\n"
        "assert 'torch' not in sys.modules\n"
        "assert dsnet.list_models()\n"
        "assert 'dsnet.training' not in sys.modules and 'dsnet.data' not in sys.modules\n"
        "for name in dsnet.__all__:\n"
        "    getattr(dsnet, name)\n"
        "for name in ('data', 'detection', 'models', 'routing', 'runtime', 'training'):\n"
        "    assert getattr(dsnet, name) is sys.modules['dsnet.' + name]\n"
        "import dsnet.cost, dsnet.extract\n"
        "assert callable(dsnet.cost) and callable(dsnet.extract)\n"
    )
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="nothing_like_it"):
        dsnet.nothing_like_it  # noqa: B018
    with pytest.raises(AttributeError, match="nothing_like_it"):
        dsnet.routing.nothing_like_it  # noqa: B018


def test_models_imports_no_training() -> None:
    done = python(
        "import sys\n"
        "from dsnet.cli import main\n"
        "assert main(['models']) == 0\n"
        "unwanted = {'dsnet.training.api', 'dsnet.data', 'dsnet.runtime', 'sympy', 'torch._dynamo'}\n"
        "assert not unwanted & set(sys.modules), unwanted & set(sys.modules)\n"
    )
    assert done.returncode == 0, done.stderr


def test_help_lists_what_is_registered() -> None:
    assert tuple(list_datasets()) == common.SETS
    assert tuple(list_backends()) == common.BACKENDS
    assert list(recipe_summaries(CLASSIFIERS).items()) == list(list_recipes().items())
    assert list(recipe_summaries(DETECTORS).items()) == list(list_recipes(DetectionConfig).items())


# --- modules of the user ------------------------------------------------------------------------------
@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A folder with a module that registers the family of CONTRIBUTING.md."""
    code = example_modules()["width_net"].replace("def width_net(", "def my_own_net(")
    (tmp_path / "my_family.py").write_text(code, encoding="utf-8")
    return tmp_path


def test_a_module_of_the_user_registers_models(family: Path) -> None:
    done = python(
        "import json, sys\n"
        "sys.path = [p for p in sys.path if p]\n"
        "from dsnet.cli import main\n"
        "assert main(['describe', 'my_own_net']) == 2\n"
        "assert main(['--import', 'my_family', 'models', '--kind', 'supernet']) == 0\n"
        "import dsnet, pathlib, torch\n"
        "from dsnet.training import save_checkpoint\n"
        "save_checkpoint(pathlib.Path('run'), 'last', dsnet.create_model('my_own_net'), step=1)\n",
        family,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^my_own_net .* two convolutions$", done.stdout, re.M)
    done = python(
        "from dsnet.cli import main; main(['describe', '--import', 'my_family', 'my_own_net'])", family
    )
    assert "3 routes, one gate" in done.stdout, done.stderr


def test_a_checkpoint_of_an_unknown_model_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = save_checkpoint(tmp_path, "last", dsnet.create_model("ds_mbnet_tiny"), step=1)
    data = json.loads((where / "checkpoint.json").read_text())
    data["network"]["name"] = "my_own_net"
    with pytest.raises(dsnet.DsnetError, match=r"'my_own_net' is not a registered model.*--import MODULE"):
        build_network(dsnet.training.Checkpoint(tensors={}, data=data))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("missing_family", ["there is no module 'missing_family'", "PYTHONPATH"]),
        ("my_family.py", ["the name of a module", "--import my_family"]),
        ("broken", ["--import broken", "importing it failed", "ZeroDivisionError", "line 2"]),
        ("lacking", ["--import lacking", "importing it failed", "no_such_package"]),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_clear_error(
    module: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken.py").write_text("x = 0\n1 / x\n")
    (tmp_path / "lacking.py").write_text("import no_such_package\n")
    assert main(["models", "--import", module]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    for word in words:
        assert word in error


# --- the last resort ----------------------------------------------------------------------------------
def test_an_unexpected_error_is_one_line_and_a_private_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def broken(kind: object) -> list[str]:
        raise RuntimeError("nobody\nforesaw \x1b[31mthis" + "!" * 5000)

    monkeypatch.setattr("dsnet.cli.models.list_models", broken)
    assert main(["models"]) == 70
    error = capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    assert len(error.splitlines()) == 1
    assert len(error) < 1000
    assert "\x1b" not in error
    assert "RuntimeError: nobody foresaw" in error
    assert str(path) in error
    text = path.read_text()
    assert "Traceback" in text
    assert "in broken" in text
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 120000000000 bytes."),
    ],
)
def test_too_little_memory_is_not_an_unexpected_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def full(kind: object) -> list[str]:
        raise error

    monkeypatch.setattr("dsnet.cli.models.list_models", full)
    assert main(["models"]) == 2
    assert "use smaller batches or images" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "no traceback to report"


def test_messages_with_control_characters_are_escaped_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "\x1b[31mred" + "x" * 100_000])
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert len(error) < 2000
    assert main(["predict", "\x1b[31mred", "image.png", "--route", "0"]) == 2
    assert "\x1b" not in capsys.readouterr().err
