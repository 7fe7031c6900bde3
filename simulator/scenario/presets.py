"""Table of the shipped scenarios, with the confidence in their predictions."""

from __future__ import annotations

from moesim.hwmodels.confidence import LEVELS, Confidence, confidence
from moesim.hwmodels.frozen import Frozen
from moesim.simulator.scenario import load_scenario, preset_names


class Preset(Frozen):
    """A shipped scenario; `confidence` is the kind of data behind its GEMM times (docs/profiles.md)."""

    preset: str
    model: str
    n_gpus: int
    accelerator: str
    profile: str
    confidence: Confidence
    defaults: int
    """Number of keys that it leaves to rules."""
    description: str


def shipped_presets() -> tuple[Preset, ...]:
    """List the shipped scenarios, sorted by name, without simulating them."""
    return tuple(preset(name) for name in preset_names())


def preset(name: str) -> Preset:
    """The row of one shipped scenario; raises InputError for another name."""
    scenario = load_scenario(name)
    machines = scenario.machines
    linear = scenario.recipe.linear
    levels = [
        confidence(machine, profile, linear)
        for machine, profile in zip(machines, scenario.calibrations, strict=True)
    ]
    return Preset(
        preset=name,
        model=scenario.shape.name,
        n_gpus=sum(machine.n_gpus for machine in machines),
        accelerator=" + ".join(machine.accelerator.name for machine in machines),
        profile=" + ".join(profile.name for profile in scenario.calibrations),
        confidence=max(levels, key=LEVELS.index),
        defaults=len(scenario.defaults),
        description=scenario.description,
    )
