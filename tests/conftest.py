"""Set-up for all tests."""

from __future__ import annotations

import os

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
