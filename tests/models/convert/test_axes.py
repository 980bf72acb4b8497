"""Axes against brute force on tensors that hold the number of each channel."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dsnet.models.convert._axes import (
    Axis,
    Group,
    axis_of,
    axis_size,
    groups_of,
    keep_whole,
    reshape_axes,
    resolve,
    split_axis,
    unify,
)
from dsnet.models.convert._axis_map import Analysis
from dsnet.models.convert._builder import Builder
from dsnet.models.convert._layers import SlicedAxis
from dsnet.models.convert._tracing import trace

Form = list[list[tuple[int, str]]]
KINDS = st.sampled_from(["number", "group", "group", "shared"])  # shared: one group of each size
TERM = st.lists(st.tuples(st.integers(1, 4), KINDS), min_size=1, max_size=3)
AXIS = st.lists(TERM, min_size=1, max_size=3)
QUICK = settings(max_examples=60, deadline=None)


def draw_axes(*forms: Form) -> list[Axis]:
    """Return sums of products of groups and numbers; groups that are shared occur several times."""
    shared: dict[int, Group] = {}

    def factor(size: int, kind: str) -> Group | int:
        if kind == "number":
            return size
        return shared.setdefault(size, Group(size)) if kind == "shared" else Group(size)

    return [tuple(tuple(factor(*one) for one in term) for term in form) for form in forms]


def expected_channels(axis: Axis, widths: dict[Group, int]) -> list[int]:
    """Return which channels widths leave, by looking at the indices of each channel along its factors."""
    channels, start = [], 0
    for term in axis:
        sizes = [factor.size if isinstance(factor, Group) else factor for factor in term]
        for number, indices in enumerate(itertools.product(*map(range, sizes))):
            kept = all(i < widths.get(f, s) for i, f, s in zip(indices, term, sizes, strict=True))
            channels += [start + number] if kept else []
        start += math.prod(sizes)
    return channels


def builder(groups: list[Group]) -> Builder:
    analysis = Analysis(trace(nn.Identity().eval(), torch.zeros(2, 3, 4, 4)))
    return Builder(analysis, {}, {group: position for position, group in enumerate(groups)}, 1)


def taken(axis: Axis, widths: dict[Group, int]) -> Tensor:
    """Return the channels that the package takes at these widths."""
    groups = list(widths)
    sliced = builder(groups).axis(axis)
    sizes = tuple(widths[group] for group in groups)
    numbers = torch.arange(axis_size(axis))
    result = sliced.take(numbers, 0, sizes)
    assert sliced.full == len(numbers)
    assert sliced.width(sizes) == len(result)
    if sliced.is_prefix:
        assert result.tolist() == list(range(len(result)))
    other = sliced.take(numbers.expand(2, -1).clone(), 1, sizes)
    assert torch.equal(other, result.expand(2, -1))
    return result


def draw_widths(data: st.DataObject, *axes: Axis) -> dict[Group, int]:
    groups = dict.fromkeys(group for axis in axes for group in groups_of(axis))
    return {group: data.draw(st.integers(1, group.size)) for group in groups if group.reason is None}


@QUICK
@given(form=AXIS, data=st.data())
def test_take_keeps_the_channels_within_all_widths(form: Form, data: st.DataObject) -> None:
    (axis,) = draw_axes(form)
    widths = draw_widths(data, axis)
    assert taken(axis, widths).tolist() == expected_channels(axis, widths)


@QUICK
@given(form=AXIS, data=st.data())
def test_resolving_replaces_groups_by_what_they_became(form: Form, data: st.DataObject) -> None:
    (axis,) = draw_axes(form)
    size, groups = axis_size(axis), list(groups_of(axis))
    for group in dict.fromkeys(groups):
        if data.draw(st.booleans()):
            divisors = [n for n in range(1, group.size + 1) if group.size % n == 0]
            outer = data.draw(st.sampled_from(divisors))
            group.become(((Group(outer), Group(group.size // outer)),))
    resolved = resolve(axis)
    assert axis_size(resolved) == axis_size(axis) == size
    assert all(group.resolved is None for group in groups_of(axis))
    assert all(factor != 1 for term in resolved for factor in term)
    widths = draw_widths(data, axis)
    assert taken(axis, widths).tolist() == expected_channels(resolved, widths)


def _factorisations(size: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(size,)]
    return [
        (n, *rest)
        for n in range(1, size + 1)
        if size % n == 0
        for rest in _factorisations(size // n, parts - 1)
    ]


@QUICK
@given(form=st.lists(AXIS, min_size=1, max_size=2), data=st.data())
def test_reshaped_axes_say_which_channels_remain(form: list[Form], data: st.DataObject) -> None:
    """Slicing the reshaped tensor along its new axes leaves what slicing the tensor before leaves."""
    axes = draw_axes(*form)
    before = [axis_size(axis) for axis in axes]
    parts = data.draw(st.integers(1, 3))
    after = data.draw(st.sampled_from(_factorisations(math.prod(before), parts)))
    result = reshape_axes(axes, after)
    assert [axis_size(axis) for axis in result] == list(after)
    assert [axis_size(axis) for axis in axes] == before
    widths = draw_widths(data, *axes, *result)
    numbers = torch.arange(math.prod(before)).reshape(before)
    sliced, reshaped = numbers, numbers.reshape(after)
    for dim, axis in enumerate(axes):
        sliced = sliced.index_select(dim, taken(axis, widths))
    for dim, axis in enumerate(result):
        reshaped = reshaped.index_select(dim, taken(axis, widths))
    assert sliced.flatten().tolist() == reshaped.flatten().tolist()


@QUICK
@given(form=AXIS, data=st.data())
def test_split_axes_say_which_channels_remain(form: Form, data: st.DataObject) -> None:
    (axis,) = draw_axes(form)
    size = axis_size(axis)
    borders = sorted(data.draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) - {size})
    sizes = [b - a for a, b in zip([0, *borders], [*borders, size], strict=True)]
    parts = split_axis(axis, sizes)
    if parts is None:
        assert len(axis) > 1 or len(axis[0]) > 1  # a single group can be split anywhere
        return
    assert [axis_size(part) for part in parts] == sizes
    widths = draw_widths(data, axis, *parts)
    numbers = torch.arange(size)
    found = [number[taken(part, widths)] for number, part in zip(numbers.split(sizes), parts, strict=True)]
    assert torch.cat(found).tolist() == taken(axis, widths).tolist()


@QUICK
@given(data=st.data())
def test_axes_split_differently_become_equal(data: st.DataObject) -> None:
    """The same channels, once as a × b and once as c × d: both sides then keep the same channels."""
    size = data.draw(st.sampled_from([1, 4, 6, 12, 24]))
    shapes = [
        data.draw(st.sampled_from(_factorisations(size, data.draw(st.integers(1, 3))))) for _ in range(2)
    ]
    first, second = ((tuple(Group(n) for n in shape),) for shape in shapes)
    unify(first, second)
    assert axis_size(first) == axis_size(second) == size
    widths = draw_widths(data, first, second)
    assert taken(first, widths).tolist() == taken(second, widths).tolist()
    if shapes[0] == shapes[1] or min(map(len, shapes)) == 1:
        assert resolve(first) == resolve(second)
        assert all(group.reason is None for group in groups_of(first))


@QUICK
@given(forms=st.tuples(AXIS, AXIS), data=st.data())
def test_unified_axes_always_keep_the_same_channels(forms: tuple[Form, Form], data: st.DataObject) -> None:
    first, second = draw_axes(*forms)
    difference = axis_size(first) - axis_size(second)
    if difference > 0:
        second = (*second, (difference,))
    elif difference:
        first = (*first, (-difference,))
    unify(first, second)
    widths = draw_widths(data, first, second)
    assert taken(first, widths).tolist() == taken(second, widths).tolist()


def test_groups_that_do_not_divide_are_kept_whole() -> None:
    group = Group(4)
    axes = reshape_axes([((group, 6),)], (6, 4))
    assert [axis_size(axis) for axis in axes] == [6, 4]
    assert group.reason == "a reshape mixes it with other dimensions"


def test_summed_groups_stay_marked() -> None:
    first, second = axis_of(Group(8)), axis_of(Group(8))
    unify(first, second, summed=True)
    outer, inner = reshape_axes([first], (2, 4))
    assert all(group.summed for axis in (first, second, outer, inner) for group in groups_of(axis))


def test_the_first_reason_stays() -> None:
    axis = axis_of(Group(8))
    keep_whole(axis, "")
    keep_whole(axis, "one")
    keep_whole(axis, "two")
    (group,) = groups_of(axis)
    assert group.reason == "one"
    other = axis_of(Group(8))
    unify(axis, other)
    assert [g.reason for g in groups_of(other)] == ["one"]


def test_tensors_of_different_sizes_are_kept_whole() -> None:
    first, second = axis_of(Group(8)), axis_of(Group(4))
    unify(first, second)
    assert {g.reason for a in (first, second) for g in groups_of(a)} == {
        "it is combined with a tensor of another size"
    }


def test_the_channels_of_fused_q_k_and_v() -> None:
    heads = Group(4)
    axis = reshape_axes([((3, heads, 2),)], (3, 4, 2))
    assert [list(groups_of(a)) for a in axis] == [[], [heads], []]
    assert taken(((3, heads, 2),), {heads: 1}).tolist() == [0, 1, 8, 9, 16, 17]


def test_a_slice_of_the_first_channels_is_a_view() -> None:
    tensor = torch.arange(12.0).reshape(6, 2)
    axis = SlicedAxis((((3, 0), (2, -1)),))
    assert axis.take(tensor, 0, (2,)).data_ptr() == tensor.data_ptr()
    assert axis.take(tensor, 0, (3,)) is tensor
    assert axis.take(tensor, 0, (2,)).tolist() == tensor[:4].tolist()


def test_a_group_that_occurs_twice_can_be_split_twice() -> None:
    group = Group(16)
    axis: Axis = ((group,), (group,))
    parts = split_axis(axis, [8, 8, 4, 12])
    assert parts is not None
    assert [axis_size(part) for part in parts] == [8, 8, 4, 12]
    group = Group(4)
    assert [axis_size(a) for a in reshape_axes([((1,), (1,), (1,)), axis_of(group)], (6, 2))] == [6, 2]
