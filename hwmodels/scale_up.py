"""The scale-up network between the GPUs of one node or scale-up domain, with its switches and links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import model_validator

from moesim.hwmodels.fabric_kinds import with_kind
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.topologies.description import ScaleUpFabric
from moesim.hwmodels.topologies.registry import SCALE_UP
from moesim.hwmodels.topologies.spec import any_fabric

if TYPE_CHECKING:
    Fabric = ScaleUpFabric
else:
    Fabric = any_fabric(SCALE_UP)

FOLDER = "scale_up"


class ScaleUp(Frozen):
    """Data of one scale-up network (`data/scale_up/*.yaml`); `kind` says which keys `fabric` has."""

    name: str = "custom"
    title: str = "custom scale-up network"
    kind: str
    fabric: Fabric
    note: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fabric_of_the_kind(cls, data: Any) -> Any:
        return with_kind(data, SCALE_UP) if isinstance(data, Mapping) else data


def list_scale_ups() -> tuple[str, ...]:
    """Names of the shipped scale-up networks."""
    return shipped_names(FOLDER)


def load_scale_up(name: str, base: Path | None = None) -> ScaleUp:
    """The scale-up network of a shipped name or a file path (relative to the file `base`, if given).

    Raises InputError for an unknown name or a malformed file.
    """
    return load_described(ScaleUp, FOLDER, name, "scale-up network", base)


ScaleUpRef = Annotated[ScaleUp, by_name(ScaleUp, load_scale_up)]
"""A field that takes a scale-up network's name, path or full description."""
