"""The sentence that the report of `dsnet demo` leads with claims no gain that was not measured."""

from __future__ import annotations

import torch

from dsnet.report.demo import Measured, beside_single, headline, measured_rows
from dsnet.routing.policies import RoutedOutput


def measured(name: str, ms: float, wrong: int) -> Measured:
    """Give 100 images, the first ``wrong`` of which are wrong."""
    nothing = RoutedOutput(torch.zeros(100, 2), torch.zeros(100, dtype=torch.long))
    return Measured(name, ms, torch.arange(100) >= wrong, nothing)


LARGEST = measured("route 1", 2.0, 5)


def test_a_gain_is_said_with_both_accuracies_and_the_share_of_the_time() -> None:
    text = headline(measured("cascade", 0.5, 6), LARGEST)
    assert text.startswith(
        "Routing gets 94.0% of the images right in 25% of the largest route's measured time"
    )
    assert text.endswith("that route alone gets 95.0%.")


def test_fewer_right_images_beyond_chance_are_no_gain() -> None:
    assert "trades accuracy for time" in headline(measured("cascade", 0.5, 25), LARGEST)


def test_a_slower_cascade_is_no_gain() -> None:
    text = headline(measured("cascade", 2.1, 0), LARGEST)
    assert text.startswith(
        "No gain on this machine: routed, 100.0% of the images are right in 105% of the time"
    )


def test_single_routes_are_named_where_they_are_better() -> None:
    singles = [measured("route 0", 0.5, 10), LARGEST]
    text = beside_single(measured("cascade", 1.0, 8), singles)
    assert "route 0, gets 90.0% right in 25% of the time: routing is +2.0 ± 1.4 points" in text
    assert "route 1, takes 100%" in text
    text = beside_single(measured("cascade", 0.4, 4), singles)
    assert text == (
        "The difference from the largest route is +1.0 ± 1.0 points, image by image. "
        "No single route is as accurate here."
    )


def test_rows_compare_with_the_largest_route() -> None:
    _, rows = measured_rows([measured("cascade", 1.0, 5), LARGEST], LARGEST)
    assert rows == [
        ["cascade", "95.00%", "+0.00 ± 0.00", "1.000", "50%"],
        ["route 1", "95.00%", "–", "2.000", "100%"],
    ]
