"""Set-up for all tests."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores already
    torch.set_num_threads(1)
