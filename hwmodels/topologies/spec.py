"""The spec that a topology registers, with its kind, the keys of its `fabric` and its builder."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, get_args

from pydantic import Field

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.topologies.base import Topology
from moesim.hwmodels.topologies.description import NodeFigures, ScaleOutFabric
from moesim.hwmodels.topologies.part import ScaleOutPart, ScaleUpPart


@dataclass(frozen=True, slots=True)
class TopologySpec:
    """A kind of topology, with its name and keys in files and its builder.

    `fabric` is the model of the keys, which `build` takes, or None for a kind without keys; its field `kind`
    is a Literal of the same name. `example` is a shipped file of this kind ("" for none).
    """

    kind: str
    fabric: type[Frozen] | None
    build: Callable[[NodeFigures, int, Any], object]
    example: str

    def __post_init__(self) -> None:
        """Raises ValueError where the fabric's Literal differs from the kind."""
        stated = None if self.fabric is None else get_args(self.fabric.model_fields["kind"].annotation)
        if stated not in (None, (self.kind,)):
            raise ValueError(
                f"topology {self.kind!r} has a fabric whose kind is {stated}; write the same name"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of `fabric` in a file, without those that all scale-out networks share."""
        if self.fabric is None:
            return ()
        shared = ScaleOutFabric.model_fields if issubclass(self.fabric, ScaleOutFabric) else {}
        return tuple(key for key in self.fabric.model_fields if key not in ("kind", *shared))

    @property
    def what(self) -> str:
        """Description for people: the first paragraph of the docstring of `fabric` (or of `build`)."""
        return " ".join(((self.fabric or self.build).__doc__ or "").split("\n\n")[0].split())


@dataclass(frozen=True, slots=True)
class ScaleUpSpec(TopologySpec):
    """Spec of a scale-up network; `build` raises InputError where the keys do not fit the node."""

    build: Callable[[NodeFigures, int, Any], ScaleUpPart]


@dataclass(frozen=True, slots=True)
class ScaleOutSpec(TopologySpec):
    """Spec of a scale-out network; `build` raises InputError where the nodes do not fit.

    `build` returns the part between the nodes (None where there is none), or a whole topology that also wires
    the inside of the nodes.
    """

    build: Callable[[NodeFigures, int, Any], ScaleOutPart | Topology | None]


def any_fabric(specs: Mapping[str, TopologySpec]) -> Any:
    """The type of a field for the fabric of any of these kinds, which its key `kind` selects."""
    fabrics: Iterator[Any] = (spec.fabric for spec in specs.values() if spec.fabric is not None)
    return Annotated[reduce(operator.or_, fabrics), Field(discriminator="kind")]


def kind_rows(specs: Mapping[str, TopologySpec]) -> list[dict[str, str]]:
    """One row per kind, for people: the kind, its own keys of `fabric`, an example and a description."""
    return [
        {"kind": spec.kind, "keys": ", ".join(spec.keys), "example": spec.example, "what": spec.what}
        for spec in specs.values()
    ]
