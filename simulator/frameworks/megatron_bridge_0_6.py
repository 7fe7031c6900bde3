"""Megatron-Bridge 0.6 (NeMo 26.08), on Megatron core of July 2026; no priced default of 0.4 changed.

What its recipes of routed models turn on for Blackwell stands in `recipes` of `simulator/data/defaults.yaml`.
"""

from __future__ import annotations

from moesim.simulator.frameworks.megatron_bridge_0_4 import release

RELEASE = release("0.6", "cd4afffa64", 204)
