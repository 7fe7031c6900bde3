"""What joins the GPUs of one node or scale-up domain: which switches, which links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.fabric_kinds import with_kind
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import SourcedBytesPerSecond, SourcedCount, SourcedSeconds

FOLDER = "scale_up"


class HubSection(Frozen):
    """Every GPU has `links_per_gpu` links, spread over `switches` chips."""

    switches: SourcedCount
    links_per_gpu: SourcedCount


class NvswitchSection(HubSection):
    """One server (HGX)."""

    kind: Literal["nvswitch"]


class DomainSection(HubSection):
    """Several servers of `gpus_per_host` GPUs that share the switch chips (NVL72)."""

    kind: Literal["scale-up-domain"]
    gpus_per_host: SourcedCount


class MeshSection(Frozen):
    """Every pair of GPUs has a link of its own (MI300X). Bandwidths are of one pair and direction."""

    kind: Literal["fully-connected"]
    link_bandwidth: SourcedBytesPerSecond
    link_bandwidth_effective: SourcedBytesPerSecond


class TorusSection(Frozen):
    """A torus of 1 to 3 dimensions; a dimension of 3 or more wraps around (TPU).

    Bandwidths are of one link to one neighbour and direction.
    """

    kind: Literal["torus"]
    dimensions: tuple[SourcedCount, ...]
    link_bandwidth: SourcedBytesPerSecond
    link_bandwidth_effective: SourcedBytesPerSecond
    latency_per_hop: Annotated[SourcedSeconds, ranges.LATENCY]

    @model_validator(mode="after")
    def _plausible(self) -> Self:
        sizes = [dimension.n for dimension in self.dimensions]
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise ValueError(f"dimensions={sizes}: a torus has 1 to 3 dimensions of at least 1")
        return self


class SupernodeSection(Frozen):
    """Hosts of `gpus_per_host` under their own first-level switches, joined by a second level.

    Both levels come in `planes` identical planes that traffic is striped over; every plane has
    `second_level_switches` chips, each wired to every host's first-level chip of that plane, without
    oversubscription (CloudMatrix384).
    """

    kind: Literal["supernode"]
    gpus_per_host: SourcedCount
    planes: SourcedCount
    second_level_switches: SourcedCount
    latency_across_hosts: Annotated[SourcedSeconds, ranges.LATENCY]
    """What the second level adds to the latency inside a host."""


Section = NvswitchSection | DomainSection | MeshSection | TorusSection | SupernodeSection

SCALE_UP_SECTIONS = ("nvswitch", "scale-up-domain", "fully-connected", "torus", "supernode")


class ScaleUp(Frozen):
    """Data of one scale-up network (`data/scale_up/*.yaml`); `kind` says which section `fabric` is."""

    name: str = "custom"
    title: str = "custom scale-up network"
    kind: str
    fabric: Annotated[Section, Field(discriminator="kind")]
    note: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _section_of_the_kind(cls, data: Any) -> Any:
        return with_kind(data, SCALE_UP_SECTIONS) if isinstance(data, Mapping) else data


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
