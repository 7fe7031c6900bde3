"""Prints the closed-form estimate of `simulate --fast`. No model in here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from moesim.simulator.scenario import Scenario


def print_estimate(loaded: Scenario, scenario: str, beside: Mapping[str, object], *, as_json: bool) -> None:
    """Print the estimate of a scenario. `beside`: further options of the command by name, with their values.

    Raises InputError for options that need the engine and for what the closed form cannot price, and
    InfeasibleError, after the estimate was printed, for a plan that does not fit into memory.
    """
    given = [name for name, value in beside.items() if value]
    if given:
        raise InputError(
            f"{' and '.join(given)}: an estimate in closed form (--fast) has none; leave out --fast"
        )
    from moesim.cli.console import default_lines, print_raw, print_text
    from moesim.cli.report import shortage
    from moesim.simulator.planner.estimate import estimate

    try:
        result = estimate(loaded)
    except InputError as error:
        raise InputError(f"{scenario}: {error}") from None
    if as_json:
        print_raw(result.model_dump_json(indent=2))
    else:
        print_text("\n".join([str(result), *default_lines(result)]))
    if not result.memory.fits:
        raise InfeasibleError(shortage(result.scenario, result.memory))
