"""How a network is converted: its routes, the gate and what is sliced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsnet.errors import DsnetError, shorten
from dsnet.models.options import GateOptions, check_count

__all__ = ["ConvertOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(GateOptions):
    """Options of `dsnet.convert`.

    Attributes:
        widths: Share of the hidden channels and heads that each route keeps, in (0, 1], the last one 1.
        residual: Share of the channels of residual streams that each route keeps (default: all).
        depths: Share of the residual blocks of each stage that each route keeps (default: all).
        table: The width of channel groups by name, one mapping for each route; overrides the shares. The
            conversion's table lists the names.
        gate: Name of the module behind which the gate decides (default: where a quarter of the cost is
            spent).
        image_size: Side of the images (default: that of the network, or of the example).
        name: Name of the network (default: that of its class). A checkpoint is loaded by this name, see
            `register_network`.

    Examples:
        >>> ConvertOptions(widths=(0.5, 1.0)).routes
        2
    """

    widths: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    residual: tuple[float, ...] | None = None
    depths: tuple[float, ...] | None = None
    table: tuple[Mapping[str, int], ...] | None = None
    gate: str | None = None
    image_size: int | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        GateOptions.__post_init__(self)
        set_field = object.__setattr__
        for field in ("widths", "residual", "depths"):
            value = getattr(self, field)
            if value is not None:
                set_field(self, field, _shares(field, value))
        for field in ("residual", "depths"):
            value = getattr(self, field)
            if value is not None and len(value) != len(self.widths):
                raise DsnetError(
                    f"{field}={shorten(value)} is for {len(value)} routes, widths={shorten(self.widths)} for "
                    f"{len(self.widths)}: give one share for each route"
                )
        if self.image_size is not None:
            check_count("image_size", self.image_size)
        if self.table is not None:
            set_field(self, "table", _table(self.table))
            given = self.widths != (0.25, 0.5, 0.75, 1.0) and len(self.widths) != len(self.table)
            if given or ((self.residual or self.depths) and len(self.widths) != len(self.table)):
                raise DsnetError(f"table is for {len(self.table)} routes, widths for {len(self.widths)}")

    @property
    def routes(self) -> int:
        """Number of routes before equal ones are merged."""
        return len(self.widths) if self.table is None else len(self.table)

    def shares(self, field: str) -> Sequence[float]:
        """Return the share of each route: of hidden channels, residual streams, or blocks."""
        value = getattr(self, field)
        if value is None or (self.table is not None and len(value) != self.routes):
            return [1.0] * self.routes
        return tuple(value)


def _shares(name: str, value: Any) -> tuple[float, ...]:  # noqa: ANN401
    if not isinstance(value, list | tuple) or not value:
        raise DsnetError(
            f"{name} are shares of each route, for example (0.25, 0.5, 1.0), not {shorten(value)}"
        )
    for share in value:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise DsnetError(f"{name}={shorten(value)}: a share must lie in (0, 1], not {shorten(share)}")
    if value[-1] != 1:
        raise DsnetError(
            f"{name}={shorten(value)}: the last route is the whole network, so its share must be 1"
        )
    return tuple(map(float, value))


def _table(value: Any) -> tuple[dict[str, int], ...]:  # noqa: ANN401
    if not isinstance(value, list | tuple) or not value or not all(isinstance(r, Mapping) for r in value):
        raise DsnetError(
            "table is one mapping for each route, from names of channel groups to widths, not "
            f"{shorten(value)}"
        )
    for row in value:
        for group, width in row.items():
            if isinstance(width, bool) or not isinstance(width, int) or width < 1:
                raise DsnetError(
                    f"table: the width of {shorten(group)} must be a positive integer, not {width!r}"
                )
    return tuple(dict(row) for row in value)
