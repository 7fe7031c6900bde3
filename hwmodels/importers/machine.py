"""One server as an import describes it, and the interface of an importer."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct, field

from moesim.hwmodels.node import Node

MOST_GPUS = 256
"""Limit for one server; the largest scale-up domains of today with one host have 72."""
MOST_SOCKETS = 64


class ImportedMachine(Struct, frozen=True):
    """One server as a file describes it.

    `pair_links` counts direct scale-up links of GPU pairs (i < j), `switch_links` those of each GPU to
    switches. `edges` are the PCIe tree, "a b 63GB/s" each, for machines without scale-up links.
    `nic_bytes_per_s` is the rate of each NIC, None where the file does not state it.
    """

    form: str
    gpus: int
    pair_links: dict[tuple[int, int], int] = field(default_factory=dict)
    switch_links: tuple[int, ...] = ()
    nics: int = 0
    nic_bytes_per_s: float | None = None
    edges: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """`nvswitch`, `fully-connected`, `pcie` (no scale-up link at all) or `partial`."""
        if self.switch_links and all(self.switch_links):
            return "nvswitch"
        if not self.pair_links and not any(self.switch_links):
            return "pcie"
        every = self.gpus * (self.gpus - 1) // 2
        same = len(set(self.pair_links.values())) == 1
        return "fully-connected" if len(self.pair_links) == every and same and self.gpus > 1 else "partial"


class MachineForm(Struct, frozen=True):
    """One file format that describes a server.

    `recognises` says whether a text has this format. `read` takes the text, the file's name for messages, and
    a shipped node for what the file does not say; it raises InputError for a malformed file.
    """

    name: str
    recognises: Callable[[str], bool]
    read: Callable[[str, str, Node], ImportedMachine]


def rate_text(bytes_per_s: float) -> str:
    """A bandwidth as an edge list writes it, without a space."""
    assert math.isfinite(bytes_per_s)
    return f"{bytes_per_s / 1e9:.6g}GB/s"
