"""A base class of objects that hold compiled programs and so belong to one process."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from dsnet.errors import DsnetError

__all__ = ["InProcess"]


class InProcess:
    """Base of frozen objects that hold compiled programs: a copy is the object itself; pickling raises."""

    __slots__ = ()

    def shared_network(self) -> str | None:
        """Return the name of the network whose own weights it runs, if it does."""
        return None

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        network = self.shared_network()
        if network is not None:
            raise DsnetError(
                f"this plan runs the weights of a network ({network}, memory='shared'), and a copy of it "
                "would run the same ones, not those of a copied network; compile the copied network instead"
            )
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise DsnetError(
            f"{type(self).__name__} cannot be pickled or sent to another process: it holds programs compiled "
            "in this one; save or send the network (or the run's folder) and call dsnet.runtime.compile there"
        )
