"""The commands `serve ...`, which serve requests with a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from moesim.cli.console import AsJson, Overrides, ScenarioName, Seed, print_raw, print_text, working
from moesim.hwmodels.errors import InfeasibleError

if TYPE_CHECKING:
    from moesim.simulator.serving.results import ServingResult

serving = typer.Typer(
    help="Serve requests with a model: what users wait, what it costs, how many GPUs it takes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@serving.command("simulate")
def simulate(
    scenario: ScenarioName,
    overrides: Overrides = None,
    as_json: AsJson = False,
    seed: Seed = None,
) -> None:
    """Serve the load of a scenario request by request."""
    from moesim.simulator.serving.simulate import serve

    extra = [] if seed is None else [f"seed={seed}"]
    with working(f"serving {scenario}"):
        result = serve(scenario, *(overrides or []), *extra)
    print_raw(result.model_dump_json(indent=2)) if as_json else print_text(str(result))
    check_served(result)


def check_served(result: ServingResult) -> None:
    """Raise InfeasibleError for a load that never drains, and for limits that no request keeps."""
    from moesim.simulator.serving.results import goodput_text, stable_text

    if not result.drains:
        raise InfeasibleError(
            f"{result.scenario}: the load never drains, the queue of {result.offered_per_s:.3g} requests/s grows "
            f"without end; {stable_text(result)}: lower the rate, or raise serving.replicas"
        )
    if result.goodput is not None and not result.goodput.share:
        raise InfeasibleError(
            f"{result.scenario}: no request keeps the limits; {goodput_text(result.goodput)}"
        )
