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
    MODULES = [m for m in MODULES if not m.startswith("dsnet.runtime.executors.ragged.")]

# Lowest layer first. A package imports from lower layers only, never from another package of its own layer.
LAYERS = (
    ("errors",),
    ("core",),
    ("counts", "routes"),
    ("slicing", "kernels"),
    ("gate",),
    ("models",),
    ("cost", "extract", "data"),
    ("routing",),
    ("calibration",),
    ("runtime",),
    ("training",),
    ("detection",),
    ("inference", "benchmark"),
    ("recipes", "report"),
    ("cli",),
)
LAYER = {package: level for level, packages in enumerate(LAYERS) for package in packages}
ROOTS = ("dsnet", "dsnet.__main__")  # the public surface, which re-exports from all layers


def package_of(module: str) -> str:
    return module.split(".")[1]


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


FOUND_BY_NAME = ("dsnet.cli", "dsnet.recipes", "dsnet.runtime.backends", "dsnet.data.readers")


def test_modules_that_only_their_folder_imports_start_with_an_underscore() -> None:
    """Where the folder's ``__init__`` imports a module, its names are public."""
    paths = {name: Path(importlib.util.find_spec(name).origin) for name in MODULES}  # type: ignore[union-attr, arg-type]
    users: dict[str, list[Path]] = {name: [] for name in MODULES}
    for path in paths.values():
        for name in imports_of(path) | strings_of(path):
            users[name].append(path)
    for name, path in paths.items():
        if path.name == "__init__.py" or path.parent == ROOT or name.startswith(FOUND_BY_NAME):
            continue
        private = all(user.parent == path.parent and user.name != "__init__.py" for user in users[name])
        assert path.name.startswith("_") == private, f"{name}: imported by {users[name]}"


def strings_of(path: Path) -> set[str]:
    """Modules that are imported by name when they are needed."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in tree if isinstance(node, ast.Constant) and node.value in MODULES}


def test_every_package_has_a_layer() -> None:
    packages = {package_of(m) for m in MODULES if m not in ROOTS}
    assert packages == set(LAYER)


@pytest.mark.parametrize("module", [m for m in MODULES if m not in ROOTS])
def test_imports_go_down(module: str) -> None:
    package = package_of(module)
    path = Path(importlib.import_module(module).__file__)
    above = {
        imported
        for imported in imports_of(path)
        if package_of(imported) != package and LAYER[package_of(imported)] >= LAYER[package]
    }
    assert not above, f"{module} is in layer {LAYER[package] + 1}, and imports {sorted(above)}"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("dsnet.runtime", ("training", "detection", "benchmark", "recipes", "report", "cli")),
        ("dsnet.routing", ("training", "calibration", "runtime")),
        ("dsnet.calibration", ("training", "runtime")),
        ("dsnet.training", ("detection", "benchmark", "recipes", "report", "cli")),
    ],
)
def test_importing_a_package_loads_none_of_these(module: str, unwanted: tuple[str, ...]) -> None:
    """What is imported lazily counts too: every public name is asked for."""
    code = (
        f"import sys, importlib; m = importlib.import_module({module!r});"
        "[getattr(m, name) for name in m.__all__];"
        f"loaded = sorted(n for n in sys.modules if n.startswith({tuple('dsnet.' + u for u in unwanted)!r}));"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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


def test_no_test_module_imports_another() -> None:
    """What several tests need lives in tests/support."""
    tests = Path(__file__).parent
    for path in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert not (module or "").startswith("tests.") or (module or "").startswith("tests.support"), path
