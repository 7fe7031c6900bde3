"""Descriptions that other tools wrote, read into ours."""

from __future__ import annotations

from moesim.hwmodels.importers.topology import ImportedTopology, import_topology

__all__ = ["ImportedTopology", "import_topology"]
