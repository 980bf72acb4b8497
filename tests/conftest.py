"""Set-up for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

pytest_plugins = (
    "tests.support.boxes",
    "tests.support.imagenet_folder",
    "tests.support.routed_run",
)

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores already
    torch.set_num_threads(1)
if (
    not torch.cuda.is_available()
):  # kernels are run by Triton's interpreter, which must know it from the start
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _time_programs_once() -> Iterator[None]:
    """Time the programs of a plan once: compiling is then several times faster."""
    with (
        mock.patch.multiple("dsnet.runtime.partition.builders", WARM_UP=1, ROUNDS=1),
        mock.patch("dsnet.runtime.executors.grouped.ROUNDS", 1),
    ):
        yield
