"""The scale-out network between nodes, with its switches, links and latencies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ValidationInfo, field_validator, model_validator

from moesim.hwmodels.fabric_kinds import with_kind
from moesim.hwmodels.fabric_prices import load_fabric_prices
from moesim.hwmodels.files import is_there
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.topologies.description import ScaleOutFabric
from moesim.hwmodels.topologies.registry import SCALE_OUT
from moesim.hwmodels.topologies.spec import any_fabric

if TYPE_CHECKING:
    Fabric = ScaleOutFabric
else:
    Fabric = any_fabric(SCALE_OUT)

FOLDER = "networks"


class Network(Frozen):
    """Data of one network (`data/networks/*.yaml`); `kind` names one of `moesim.hwmodels.topologies`."""

    name: str
    title: str
    kind: str
    fabric: Fabric | None = None
    prices: str | None = None
    """Name or path of a price list, which is not loaded here: a predicted step does not depend on prices."""
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
    return shipped_names(FOLDER)


def load_network(name: str, base: Path | None = None) -> Network:
    """The network of a shipped name or a file path (relative to the file `base`, if given).

    Raises InputError for an unknown name or a malformed file.
    """
    return load_described(Network, FOLDER, name, "network", base)


NetworkRef = Annotated[Network, by_name(Network, load_network)]
"""A field that takes a network's name, path or full description."""
