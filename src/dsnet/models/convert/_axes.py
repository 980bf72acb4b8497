"""Channel axes: which channels of a tensor belong to which group, and must therefore be sliced together.

A dimension of a tensor is an *axis*: a sum of terms, each a product of factors in row-major order. A factor
is a `Group` of channels or a number that is never sliced. So the output of a layer is one group; the input of
a layer behind a concatenation is a sum of groups; the fused Q, K and V of an attention are a product of 3, a
group of heads, and the features of a head; flattened maps are a product of channels and positions.

Groups start out separate, one for each dimension of a weight. Layers that read what others write make them
equal (`unify`); reshaping splits them (`reshape_axes`, `split_axis`); what is not understood keeps them whole
(`keep_whole`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

__all__ = [
    "Axis",
    "Factor",
    "Group",
    "axis_of",
    "axis_size",
    "groups_of",
    "keep_whole",
    "reshape_axes",
    "resolve",
    "split_axis",
    "unify",
]


class Group:
    """Channels that are sliced together, or that were found to consist of other groups.

    Attributes:
        size: Number of channels.
        reason: Why the group stays whole; None while it may be sliced, empty if that needs no explanation.
        summed: Whether two branches of the network are added in these channels, as in a residual stream.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reason: str | None = None
        self.summed = False
        self._becomes: Axis | None = None  # another group, or parts

    @property
    def resolved(self) -> Axis | None:
        """What the group was found to be; None while it stands for itself."""
        return self._becomes

    def become(self, axis: Axis) -> None:
        """Replace the group, wherever it occurs, by an axis of the same size."""
        assert self._becomes is None
        assert axis_size(axis) == self.size
        for group in groups_of(axis):
            group.summed = group.summed or self.summed
            if self.reason is not None and not group.reason:
                group.reason = self.reason
        self._becomes = axis


Factor: TypeAlias = Group | int
Term: TypeAlias = tuple[Factor, ...]
Axis: TypeAlias = tuple[Term, ...]


def axis_of(factor: Factor) -> Axis:
    """Return the axis of one group or number."""
    return ((factor,),)


def _factor_size(factor: Factor) -> int:
    return factor if isinstance(factor, int) else factor.size


def _term_size(term: Term) -> int:
    return math.prod(map(_factor_size, term))


def axis_size(axis: Axis) -> int:
    """Return the number of channels of an axis."""
    return sum(map(_term_size, axis))


def resolve(axis: Axis) -> Axis:
    """Replace groups by what they were found to be, and drop factors of 1."""
    terms: list[Term] = []
    for term in axis:
        expanded: list[Term] = [()]
        for factor in term:
            if isinstance(factor, int) or factor.resolved is None:
                parts: Axis = ((factor,),)
            else:
                parts = resolve(factor.resolved)
            if len(parts) == 1:
                expanded = [(*front, *parts[0]) for front in expanded]
            elif expanded == [()]:
                expanded = list(parts)
            else:  # channels of the parts alternate: not contiguous
                keep_whole(parts, "its channels alternate with those of other groups")
                expanded = [(*front, axis_size(parts)) for front in expanded]
        terms += expanded
    return tuple(tuple(f for f in term if _factor_size(f) != 1) for term in terms)


def groups_of(axis: Axis) -> Iterator[Group]:
    """Yield the groups of an axis."""
    for term in resolve(axis):
        yield from (factor for factor in term if isinstance(factor, Group))


def keep_whole(axis: Axis, reason: str) -> None:
    """Mark the groups of an axis as never sliced. The first reason that is not empty stays."""
    for group in groups_of(axis):
        group.reason = group.reason or reason


def unify(first: Axis, second: Axis, *, summed: bool = False) -> None:
    """Make two axes of the same size equal.

    Args:
        first: An axis.
        second: Another axis.
        summed: Whether they are equal because two branches of the network are added.
    """
    first, second = resolve(first), resolve(second)
    if axis_size(first) == axis_size(second):
        if first != second and not _unify_whole(first, second) and not _unify_terms(first, second):
            reason = "layers need its channels in different orders"
            keep_whole(first, reason)
            keep_whole(second, reason)
    else:
        reason = "it is combined with a tensor of another size"
        keep_whole(first, reason)
        keep_whole(second, reason)
    if summed:
        for group in (*groups_of(first), *groups_of(second)):
            group.summed = True


def _unify_whole(first: Axis, second: Axis) -> bool:
    """Let an axis of a single group become the other axis."""
    for one, other in ((first, second), (second, first)):
        if len(one) == 1 and len(one[0]) == 1 and isinstance(one[0][0], Group):
            group = one[0][0]
            if group not in set(groups_of(other)):
                group.become(other)
                return True
    return False


def _unify_terms(first: Axis, second: Axis) -> bool:
    if len(first) != len(second) or list(map(_term_size, first)) != list(map(_term_size, second)):
        return False
    return all(_unify_factors(a, b) for a, b in zip(first, second, strict=True))


def _unify_factors(first: Term, second: Term) -> bool:
    """Unify two products of the same size, splitting factors where they have different boundaries."""
    a, b = list(first), list(second)
    while True:
        for factors in (a, b):  # a group that occurs twice was perhaps replaced
            (*others, factors[:]) = resolve((tuple(factors),))
            if others:
                return False
        if not a or not b:
            return not a and not b
        one, other = a.pop(), b.pop()
        small, large = sorted((one, other), key=_factor_size)
        if _factor_size(small) < _factor_size(large):
            halves = split_factor(large, _factor_size(large) // _factor_size(small), _factor_size(small))
            if halves is None:
                return False
            (a if large is one else b).append(halves[0])
            large = halves[1]
        if isinstance(small, Group) and small is not large:
            small.become(axis_of(large))
        elif isinstance(large, Group) and isinstance(small, int):
            large.become(axis_of(small))


def split_factor(factor: Factor, outer: int, inner: int) -> tuple[Factor, Factor] | None:
    """Split a factor into a product, or return None if the sizes do not fit."""
    if outer * inner != _factor_size(factor):
        return None
    if isinstance(factor, int):
        return outer, inner
    parts = (Group(outer), Group(inner))
    factor.become((parts,))
    return parts


def split_axis(axis: Axis, sizes: Sequence[int]) -> list[Axis] | None:
    """Split an axis into consecutive parts, or return None if that is not possible.

    Args:
        axis: The axis.
        sizes: Sizes of the parts.
    """
    rest, parts = list(resolve(axis)), []
    for size in sizes:
        part: list[Term] = []
        while size:
            if not rest:
                return None
            term, *others = resolve((rest.pop(0),))  # it may hold a group that was split before
            rest[:0] = others
            if _term_size(term) > size:
                front = _split_term(term, size)
                if front is None:
                    return None
                term, back = front
                rest.insert(0, back)
            part.append(term)
            size -= _term_size(term)
        parts.append(tuple(part))
    return parts if not rest else None


def _split_term(term: Term, size: int) -> tuple[Term, Term] | None:
    """Split a term into the first ``size`` channels and the others."""
    first, inner = term[0], _term_size(term[1:])
    if size % inner:
        return None
    count = size // inner
    if isinstance(first, int):
        return (count, *term[1:]), (first - count, *term[1:])
    halves = Group(count), Group(first.size - count)
    first.become(((halves[0],), (halves[1],)))
    return (halves[0], *term[1:]), (halves[1], *term[1:])


def reshape_axes(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """Return the axes of a tensor after a reshape.

    Args:
        axes: Axes before.
        shape: Sizes after, with the same product. Groups that cannot be followed stay whole.
    """
    result: list[Axis] = []
    before, after = list(axes), list(shape)
    while before or after:
        olds = [before.pop(0)] if before else []
        news = [after.pop(0)] if after else []
        while (left := math.prod(map(axis_size, olds))) != (right := math.prod(news)):
            if left < right:
                olds.append(before.pop(0))
            else:
                news.append(after.pop(0))
        result += _reshape_part([resolve(axis) for axis in olds], news)
    return result


def _reshape_part(axes: Sequence[Axis], sizes: Sequence[int]) -> list[Axis]:
    """Reshape consecutive axes that together become ``sizes``."""
    axes = [axis for axis in axes if axis_size(axis) != 1]
    large = [size for size in sizes if size != 1]
    parts: list[Axis] | None
    if len(axes) <= 1 and len(large) <= 1:
        parts = list(axes)
    elif any(len(axis) > 1 for axis in axes[1:]):
        parts = None
    else:
        inner = tuple(factor for axis in axes[1:] for factor in axis[0])
        parts = _divide([(*term, *inner) for term in axes[0]], large)
    if parts is None:
        for axis in axes:
            keep_whole(axis, "a reshape mixes it with other dimensions")
        parts = [axis_of(size) for size in large]
    remaining = iter(parts)
    return [next(remaining) if size != 1 else ((),) for size in sizes]


def _divide(terms: Sequence[Term], sizes: Sequence[int]) -> list[Axis] | None:
    """Divide a sum of products into dimensions; all terms must have the same inner dimensions."""
    divided: list[list[Term]] = []
    for number, term in enumerate(terms):
        outer = _term_size(term) // math.prod(sizes[1:])
        factors = _divide_term(term, [outer, *sizes[1:]])
        if factors is None or (number and factors[1:] != divided[0][1:]):
            return None
        divided.append(factors)
    return [tuple(factors[0] for factors in divided), *(((axis,)) for axis in divided[0][1:])]


def _divide_term(term: Term, sizes: Iterable[int]) -> list[Term] | None:
    factors, result = list(term), []
    for size in sizes:
        dimension: list[Factor] = []
        while _term_size(tuple(dimension)) < size:
            if not factors:
                return None
            factor = factors.pop(0)
            if isinstance(factor, Group) and factor.resolved is not None:  # split where it occurred before
                parts = resolve(axis_of(factor))
                if len(parts) > 1:
                    return None
                factors[:0] = parts[0]
                continue
            missing, rest = divmod(size, _term_size(tuple(dimension)))
            if rest:
                return None
            if _factor_size(factor) > missing:
                halves = split_factor(factor, missing, _factor_size(factor) // missing)
                if halves is None:
                    return None
                factor, inner = halves
                factors.insert(0, inner)
            dimension.append(factor)
        if _term_size(tuple(dimension)) != size:
            return None
        result.append(tuple(dimension))
    return result if not factors else None
