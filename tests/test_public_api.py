"""The public surface: a change of a name or a signature must be meant."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.public_api import PACKAGES, public_api

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def test_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    """After a change that is meant: DSNET_UPDATE_SNAPSHOT=1 pytest tests/test_public_api.py."""
    if os.environ.get("DSNET_UPDATE_SNAPSHOT"):
        SNAPSHOT.write_text(public_api(), encoding="utf-8")
    assert public_api().splitlines() == SNAPSHOT.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_and_classes_have_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    documented = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}
    assert not [name for name, value in documented.items() if not inspect.getdoc(value)]


IMPORT_EVERYTHING = f"""
import importlib, pkgutil, sys, dsnet
assert dsnet.runtime.compile
for name in {PACKAGES!r}:
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "__main__":
            importlib.import_module(name + "." + module.name)
for name in {PACKAGES!r}:
    package = sys.modules[name]
    hidden = [n for n in package.__all__ if n != "__version__" and type(getattr(package, n)) is type(sys)]
    assert not hidden, (name, hidden)
"""


def test_no_module_hides_a_public_name() -> None:
    """Importing `a.b` sets the attribute `b` of `a`, in place of a name that is imported on first use."""
    subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], check=True, timeout=120)


def test_the_public_packages_have_an_api_page() -> None:
    pages = {page.stem for page in (Path(__file__).parents[1] / "docs" / "api").glob("*.md")}
    assert pages == {package.removeprefix("dsnet.") for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_api_pages_list_names_that_a_module_shares(package: str) -> None:
    """`::: package` lists the members of a package, but of `extract.extract` only the module."""
    page = Path(__file__).parents[1] / "docs" / "api" / f"{package.removeprefix('dsnet.')}.md"
    text = page.read_text(encoding="utf-8")
    for name in importlib.import_module(package).__all__:
        path = f"{package}.{name}"
        if path not in PACKAGES and not name.startswith("_") and importlib.util.find_spec(path) is not None:
            assert f"::: {path}.{name}\n" in text


def test_examples_stand_under_the_heading_that_the_reference_renders() -> None:
    source = Path(importlib.import_module("dsnet").__file__ or "").parent
    for path in source.rglob("*.py"):
        if "cli" not in path.parts:  # its docstrings are help texts
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            assert "Example:" not in lines, f"{path}: write `Examples:`"


def test_names_that_the_documents_mention_exist() -> None:
    root = Path(__file__).parents[1]
    names = set()
    for page in [*root.glob("*.md"), *root.glob("docs/*.md")]:
        names |= set(re.findall(r"`(dsnet(?:\.\w+)+)[`(]", page.read_text(encoding="utf-8")))
    assert "dsnet.runtime.Plan" in names
    for name in sorted(names):
        assert pkgutil.resolve_name(name) is not None
