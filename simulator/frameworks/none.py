"""No framework: every option that a scenario does not state is off."""

from __future__ import annotations

from moesim.simulator.frameworks.registry import Release

RELEASE = Release("no framework", {})
