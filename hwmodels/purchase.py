"""Costs of buying and running a cluster: hardware, building, upkeep and write-off times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from moesim.hwmodels import ranges
from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import (
    UNDATED,
    SourcedFraction,
    SourcedSeconds,
    SourcedUsd,
    SourcedUsdPerWatt,
    SourcedUsdPerWattYear,
    sourced_numbers,
)

FOLDER = "purchases"


class Purchase(Frozen):
    """Data of one way to buy (`data/purchases/*.yaml`); every price needs its date.

    Hardware is written off in equal parts over `amortisation` and the building over
    `building_amortisation`; both are divided by `utilisation`.
    """

    name: str = "custom"
    title: str = "stated purchase"
    accelerators: tuple[str, ...] = ()
    """Accelerators that it buys; empty for whichever the cluster has."""
    system_per_gpu: SourcedUsd
    """GPU with its share of server, NICs and whatever `title` says is in the price."""
    network_per_gpu: SourcedUsd | None = None
    """Switches and cables, where `system_per_gpu` does not include them."""
    storage: SourcedUsd | None = None
    """The whole storage system."""
    amortisation: Annotated[SourcedSeconds, ranges.LIFETIME]
    building: SourcedUsdPerWatt | None = None
    """Shell, cooling and power distribution per W of IT load."""
    building_amortisation: Annotated[SourcedSeconds, ranges.LIFETIME] | None = None
    upkeep: SourcedUsdPerWattYear | None = None
    """Staff, maintenance, taxes per W of IT load and year, without electricity."""
    utilisation: Annotated[SourcedFraction, ranges.USE]
    """Share of calendar time in which the cluster does paid work."""
    note: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Purchase:
        undated = [path for path, number in sourced_numbers(self) if number.date == UNDATED]
        if undated:
            raise ValueError(
                f"{', '.join(undated)}: a price needs provenance with its date, for example "
                '{value: "$30000", kind: assumed, source: "a quote", date: 2026-05}'
            )
        if (self.building is None) != (self.building_amortisation is None):
            raise ValueError("building and building_amortisation belong together: give both or none")
        return self


def list_purchases(accelerator: str | None = None) -> tuple[str, ...]:
    """Names of the shipped purchases: all, or those that buy an accelerator."""
    names = shipped_names(FOLDER)
    if accelerator is None:
        return names
    return tuple(name for name in names if accelerator in load_purchase(name).accelerators)


def load_purchase(name: str, base: Path | None = None) -> Purchase:
    """The purchase of a shipped name or a file path; raises InputError for an unknown or malformed one."""
    return load_described(Purchase, FOLDER, name, "purchase", base)


PurchaseRef = Annotated[Purchase, by_name(Purchase, load_purchase)]
"""A field that takes a purchase's name, path or full description."""
