"""What a conversion did: its channel groups and their widths."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Conversion", "GroupReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """A group of channels that are sliced together.

    Attributes:
        name: Name: that of the layer that writes them.
        layers: Names of all layers that have these channels on a side of their weights.
        channels: Number of channels, heads or groups of channels.
        widths: How many of them each route keeps.
        reason: Why the group stays whole; None if it is sliced.
    """

    name: str
    layers: tuple[str, ...]
    channels: int
    widths: tuple[int, ...]
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a conversion did. Printing it shows a table.

    Attributes:
        groups: The groups of channels.
        gate: Name of the part of the network behind which the gate decides.
        depths: Number of blocks that each route runs.
        error: Largest relative difference between the logits of the largest route and those of the network on
            the example; None on the meta device.
    """

    groups: tuple[GroupReport, ...]
    gate: str
    depths: tuple[int, ...]
    error: float | None = None

    @property
    def sliced(self) -> tuple[GroupReport, ...]:
        """The groups that are sliced."""
        return tuple(group for group in self.groups if group.reason is None)

    def __str__(self) -> str:
        header = ["group", "layers", "channels", "width per route", "whole because"]
        rows = [
            [
                group.name,
                str(len(group.layers)),
                str(group.channels),
                " ".join(map(str, group.widths)) if group.reason is None else "",
                group.reason or "",
            ]
            for group in self.groups
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in
                 [header, *rows]]  # fmt: skip
        sliced = len(self.sliced)
        if not sliced and len(self.depths) == 1:
            lines += ["", "No channels are sliced, so there is one route. Options: residual, depths, table."]
        return "\n".join(
            [
                *lines,
                "",
                f"{sliced} of {len(self.groups)} groups are sliced; the gate decides behind {self.gate}; "
                f"routes run {', '.join(map(str, self.depths))} blocks",
            ]
        )
