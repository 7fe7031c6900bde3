"""Rates at which a storage system writes checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import model_validator

from moesim.hwmodels.frozen import Frozen
from moesim.hwmodels.library import by_name, load_described, shipped_names
from moesim.hwmodels.provenance import SourcedBytesPerSecond

FOLDER = "storage"


class Storage(Frozen):
    """Data of one storage system (`data/storage/*.yaml`), as a whole, per compute node, or both."""

    name: str = "custom"
    title: str = "stated storage"
    write: SourcedBytesPerSecond | None = None
    """Write rate of all compute nodes together."""
    write_per_node: SourcedBytesPerSecond | None = None
    """Write rate of one compute node."""
    note: str | None = None

    @model_validator(mode="after")
    def _some_rate(self) -> Storage:
        rates = [rate for rate in (self.write, self.write_per_node) if rate is not None]
        if not rates or any(rate.value <= 0.0 for rate in rates):
            raise ValueError("give write or write_per_node (or both), above 0, for example 2 TB/s")
        return self

    def write_bytes_per_s(self, nodes: int) -> float:
        """Write rate of this many compute nodes together, limited by the system or by the nodes."""
        rates = []
        if self.write is not None:
            rates.append(self.write.value)
        if self.write_per_node is not None:
            rates.append(self.write_per_node.value * nodes)
        return min(rates)


def list_storage() -> tuple[str, ...]:
    """Names of the shipped storage systems."""
    return shipped_names(FOLDER)


def load_storage(name: str, base: Path | None = None) -> Storage:
    """The storage system of a shipped name or a file path; raises InputError for an unknown one."""
    return load_described(Storage, FOLDER, name, "storage system", base)


StorageRef = Annotated[Storage, by_name(Storage, load_storage)]
"""A field that takes a storage system's name, path or full description."""
