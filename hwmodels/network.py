"""The scale-up network between the GPUs of a node or domain, and the scale-out network between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ValidationInfo, field_validator, model_validator

from moesim.hwmodels.files import is_there
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.price import load_fabric_prices
from moesim.hwmodels.topologies.description import Buildings, ScaleOutFabric, ScaleUpFabric
from moesim.hwmodels.topologies.part import TopologySpec, any_fabric
from moesim.hwmodels.topologies.registry import SCALE_OUT, SCALE_UP
from moesim.hwmodels.validation import nearest
from moesim.hwmodels.yaml_io import by_name, load_described, shipped_names

# -- descriptions of a fabric ----------------------------------------------------------------------


def with_kind(data: Mapping[str, Any], specs: Mapping[str, TopologySpec]) -> dict[str, Any]:
    """The mapping with its `kind` written into its `fabric`, where pydantic looks for it.

    Raises ValueError for an unknown kind, for a missing fabric, and for one that the kind does not have.
    """
    kind, fabric = data.get("kind"), data.get("fabric")
    if not isinstance(kind, str):
        return dict(data)  # pydantic reports the error
    known = sorted(specs)
    if kind not in known:
        raise ValueError(
            f"unknown kind {kind!r}{nearest(kind, known)}; the known ones are {', '.join(known)}"
        )
    if specs[kind].fabric is None:
        if fabric is not None:
            raise ValueError(f"a network of kind {kind!r} has no fabric: leave the key out")
        return dict(data)
    if fabric is None:
        raise ValueError(f"a network of kind {kind!r} needs the key fabric")
    return {**data, "fabric": {**fabric, "kind": kind} if isinstance(fabric, Mapping) else fabric}


# -- scale-up --------------------------------------------------------------------------------------

if TYPE_CHECKING:
    UpFabric = ScaleUpFabric
else:
    UpFabric = any_fabric(SCALE_UP)

SCALE_UPS = "scale_up"


class ScaleUp(Frozen):
    """Data of one scale-up network (`data/scale_up/*.yaml`); `kind` says which keys `fabric` has."""

    name: str = "custom"
    title: str = "custom scale-up network"
    kind: str
    fabric: UpFabric
    note: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fabric_of_the_kind(cls, data: Any) -> Any:
        return with_kind(data, SCALE_UP) if isinstance(data, Mapping) else data


def list_scale_ups() -> tuple[str, ...]:
    """Names of the shipped scale-up networks."""
    return shipped_names(SCALE_UPS)


def load_scale_up(name: str, base: Path | None = None) -> ScaleUp:
    """The scale-up network of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(ScaleUp, SCALE_UPS, name, "scale-up network", base)


ScaleUpRef = Annotated[ScaleUp, by_name(ScaleUp, load_scale_up)]
"""A field that takes a scale-up network's name, path or full description."""


# -- scale-out -------------------------------------------------------------------------------------

if TYPE_CHECKING:
    OutFabric = ScaleOutFabric
else:
    OutFabric = any_fabric(SCALE_OUT)

NETWORKS = "networks"


class Network(Frozen):
    """Data of one network (`data/networks/*.yaml`); `kind` names one of `moesim.hwmodels.topologies`."""

    name: str
    title: str
    kind: str
    fabric: OutFabric | None = None
    adapter: str | None = None
    """Kind of the NICs that it joins, as in `Node.adapter`; absent: InfiniBand or RoCE."""
    prices: str | None = None
    """Name or path of a price list, which is not loaded here: a predicted step does not depend on prices."""
    buildings: Buildings | None = None
    """Equal buildings with this network in each, and the link between every two; absent: one building."""
    note: str | None = None

    @field_validator("prices")
    @classmethod
    def _prices_exist(cls, value: str | None, info: ValidationInfo) -> str | None:
        place = (info.context or {}).get("place")
        base = Path(place) if place else None
        if value is None or base is None:
            return value
        beside = base.parent / value
        path = str(beside) if is_there(beside) else value
        load_fabric_prices(path)
        return path

    @model_validator(mode="before")
    @classmethod
    def _fabric_of_the_kind(cls, data: Any) -> Any:
        return with_kind(data, SCALE_OUT) if isinstance(data, Mapping) else data


def list_networks() -> tuple[str, ...]:
    """Names of the shipped networks."""
    return shipped_names(NETWORKS)


def load_network(name: str, base: Path | None = None) -> Network:
    """The network of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(Network, NETWORKS, name, "network", base)


NetworkRef = Annotated[Network, by_name(Network, load_network)]
"""A field that takes a network's name, path or full description."""
