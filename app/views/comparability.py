"""Sentences on why two predictions are hard to compare."""

from __future__ import annotations

from collections.abc import Sequence

from moesim.app.views.headline import compact
from moesim.simulator.predict.result import Result
from moesim.simulator.scenario import Scenario

Side = tuple[Scenario, Result]

STANDS_ON = {
    "measured": "rates measured on the accelerator",
    "published": "published or derived rates",
    "peak-only": "datasheet peaks and an assumed efficiency",
}
"""The evidence behind the GEMM rates, by confidence."""


def price(scenario: Scenario) -> str:
    """The price of a GPU-hour behind the predicted cost, in words."""
    stated = scenario.machine.price_per_gpu_hour
    return "no price" if stated is None else stated.text


def unlike(sides: Sequence[Side]) -> list[str]:
    """Sentences on the differences that make totals hard to compare; the first scenario is A."""
    found = []
    gpus = [f"{scenario.machine.n_gpus:,}" for scenario, _ in sides]
    if len(set(gpus)) > 1:
        found.append(
            f"Not the same number of GPUs: {_each(gpus)}. Compare what is counted a GPU, a dollar or a "
            "token; step time, days and tokens a day are those of the whole cluster."
        )
    kinds = [result.confidence for _, result in sides]
    if len(set(kinds)) > 1:
        words = [f"{STANDS_ON[result.confidence]} (profile {result.profile})" for _, result in sides]
        found.append(
            f"Not the same kind of profile: {_each(words)}. Part of a difference between them is that of the "
            "profiles, not of the plans."
        )
    tokens = [f"{compact(result.run.tokens)} tokens" for _, result in sides]
    if len(set(tokens)) > 1:
        found.append(f"Not the same run: {_each(tokens)}. Days, GPU-hours and cost are of these.")
    models = [scenario.shape.name for scenario, _ in sides]
    if len(set(models)) > 1:
        found.append(f"Not the same model: {_each(models)}.")
    return found


def _each(words: Sequence[str]) -> str:
    """One clause per scenario, such as "A has 1,024, B has 2,048"."""
    return ", ".join(f"{letter} has {word}" for letter, word in zip("ABCD", words, strict=False))
