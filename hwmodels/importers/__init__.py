"""Imports machine descriptions that other tools wrote."""

from __future__ import annotations

from moesim.hwmodels.importers.topology import ImportedTopology, import_topology

__all__ = ["ImportedTopology", "import_topology"]
