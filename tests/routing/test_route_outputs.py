"""Simulated policies: means and their errors."""

from __future__ import annotations

import pytest
import torch

from dsnet.routing.route_outputs import Simulation


def simulation(costs: list[float]) -> Simulation:
    count = len(costs)
    return Simulation(
        columns=torch.zeros(count, dtype=torch.long),
        costs=torch.tensor(costs, dtype=torch.float64),
        correct=torch.arange(count) % 2 == 0,
    )


def test_the_error_of_a_mean_cost_falls_with_the_root_of_the_images() -> None:
    """Two values, equally often: the variance of n such values is (half their difference)² · n / (n − 1)."""
    for pairs in (1, 8, 50):
        seen, count = simulation([3.0, 7.0] * pairs), 2 * pairs
        assert seen.cost == 5.0
        assert seen.cost_error == pytest.approx((2.0**2 / (count - 1)) ** 0.5)
        assert seen.accuracy == 0.5


def test_one_image_says_nothing_about_the_error() -> None:
    assert simulation([3.0]).cost_error == 0.0
