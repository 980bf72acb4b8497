"""How the package is built: imports do nothing and go one way, nothing is tied to a device."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import dsnet

ROOT = Path(dsnet.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "dsnet.") if m.name != "dsnet.__main__")
if importlib.util.find_spec("triton") is None:  # there is none for macOS and Windows
    MODULES = [m for m in MODULES if not m.startswith("dsnet.runtime.ragged.")]

# Lower layers first; a module may import from its own layer and from those before it.
LAYERS = [
    [
        "dsnet.errors",
        "dsnet.cpus",
        "dsnet.counts",
        "dsnet.routes",
        "dsnet.files",
        "dsnet.formats",
        "dsnet.schema",
        "dsnet.interrupt",
    ],
    ["dsnet.slicing"],
    ["dsnet.gate"],
    ["dsnet.models"],
    ["dsnet.cost", "dsnet.extract"],
    ["dsnet.data", "dsnet.detection", "dsnet.training", "dsnet.routing"],
    ["dsnet.runtime"],
    ["dsnet.recipes", "dsnet.report"],
    ["dsnet.cli"],
]


def layer_of(module: str) -> int:
    for level, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return level
    raise AssertionError(f"{module} has no layer: add it to LAYERS")


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports(module: str) -> None:
    importlib.import_module(module)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("dsnet.") and name in MODULES}


@pytest.mark.parametrize("module", [m for m in MODULES if m != "dsnet"])
def test_imports_go_one_way(module: str) -> None:
    path = Path(importlib.import_module(module).__file__)
    for imported in imports_of(path):
        assert layer_of(imported) <= layer_of(module), f"{module} imports {imported}"


def test_routes_import_nothing_of_ours_but_the_error() -> None:
    assert imports_of(ROOT / "routes.py") == {"dsnet.errors"}


def test_importing_touches_no_arguments_files_or_seeds() -> None:
    code = (
        "import sys, torch; sys.argv = ['x', '--nonsense']; before = torch.get_rng_state();"
        "from dsnet import *; import dsnet.cli.demo, dsnet.cli.train;"
        "assert torch.equal(before, torch.get_rng_state());"
        "unwanted = {'torchvision', 'timm', 'PIL', 'matplotlib', 'sklearn', 'onnx'} & set(sys.modules);"
        "assert not unwanted, unwanted"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_nothing_is_tied_to_a_device() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ".cuda(" not in text, path
        assert "torch.manual_seed" not in text or path.parent.name == "cli", path
