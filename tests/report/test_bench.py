"""The result of a benchmark as text, chart and page."""

from __future__ import annotations

import dataclasses
import re

import pytest

from dsnet.report.bench import bench_page, bench_plot, bench_text
from tests.support.bench_result import MIXED, bench_result


def test_the_table_states_times_ratios_and_conditions() -> None:
    text = bench_text(bench_result())
    lines = [line.split() for line in text.splitlines()]
    assert ["masking", "20.00", "18.00", "to", "22.00", "200%"] in lines
    assert ["largest,", "no", "plan", "30.00", "27.00", "to", "33.00", "300%"] in lines
    assert ["gated", "plan", "80.00", "72.00", "to", "88.00", "50%", "0.80"] in lines
    assert ["gated:", "multiply-adds", "25%"] in lines
    assert ["gated:", "ideal", "64.00", "40%"] in lines
    assert ["cascade", "plan", "8.00", "7.20", "to", "8.80", "80%", "0.75"] in lines
    assert ["mobilenet_v1", "(onnxruntime)", "9.00", "8.10", "to", "9.90", "90%"] in lines
    assert "2 threads, 2450 MHz (CPU), load 1.50 before" in text
    assert "a test: 50% at 0 (1.00k), 25% at 1 (2.00k), 25% at 3 (4.00k)" in text
    assert "route 0 for all images, then route 1 for 50%, then route 3 for 25%" in text
    many = dataclasses.replace(MIXED, shares=dict.fromkeys(range(20), 1 / 20))
    assert "20 from 0 to 19, at most 5%" in bench_text(dataclasses.replace(bench_result(), mix=many))


def test_the_plot_shows_theory_ideal_and_measured_time_by_batch() -> None:
    plot = bench_plot(bench_result()).svg("A <fast> one")
    heights = [float(h) for h in re.findall(r'class="bar".*? height="([\d.]+)"', plot)]
    assert len(heights) == 6
    assert heights[:3] == heights[3:], "the same shares at both batch sizes"
    theory, ideal, measured = heights[:3]
    assert (ideal / theory, measured / theory) == (pytest.approx(1.6, 0.01), pytest.approx(2.0, 0.01))
    assert "measured time, batch 16: 50.0%" in plot
    assert "A &lt;fast&gt; one" in plot
    shown = bench_page(bench_result())
    assert shown.count("<svg") == 2  # for wide pages and for narrow ones
    assert shown.count("<table>") == 2
    assert "<td>mobilenet_v1 (onnxruntime)</td>" in shown
