"""The text of `simulate`, `explain` and `plan` for a fleet: pools, and their mean peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanResult
    from moesim.simulator.predict.fleet_compile import PreparedFleet
    from moesim.simulator.predict.result import Result
    from moesim.simulator.predict.result_parts import PoolResult
    from moesim.simulator.scenario import Scenario

GIB = 2**30


def simulate_fleet(scenario: Scenario, name: str, per_gpu: bool, uncertainty: bool, as_json: bool) -> Result:
    """Predict and print a scenario with a fleet; `per_gpu`: traces or pictures are asked for, and refused."""
    from moesim.cli.console import print_text

    if per_gpu:
        raise InputError(
            "traces and pictures of a fleet are not drawn: leave --trace, --trace-per-rank, --ranks, "
            "--members and --picture out, or give one cluster in the place of fleet"
        )
    if uncertainty:
        raise InputError(
            "--uncertainty needs one cluster: the errors of several profiles are not combined; leave it out, "
            "or give one cluster in the place of fleet"
        )
    fleet, result = _predict(scenario, name)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_text(_summary(fleet, result))
    return result


def explain_fleet(scenario: Scenario, name: str) -> Result:
    """Print everything behind a prediction of a fleet."""
    from moesim.cli.console import print_text
    from moesim.cli.report import print_details

    fleet, result = _predict(scenario, name)
    print_details(_headline(fleet, result), result)
    print_text("\npools")
    print_pools(result.pools)
    return result


def _predict(scenario: Scenario, name: str) -> tuple[PreparedFleet, Result]:
    from moesim.cli.console import working

    with working(f"simulating {name}"):
        from moesim.simulator.engine.simpy.execute import execute
        from moesim.simulator.predict.fleet_compile import prepare_fleet
        from moesim.simulator.predict.fleet_simulate import fleet_result

        try:
            fleet = prepare_fleet(scenario)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        return fleet, fleet_result(fleet, execute(fleet.program))


def _headline(fleet: PreparedFleet, result: Result) -> str:
    plan, first = fleet.scenario.parallel, fleet.prepared[0]
    degrees = [("tp", plan.tp), ("cp", plan.cp), ("pp", plan.pp), ("ep", plan.ep), ("dp", first.layout.dp)]
    shown = " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)
    held = " + ".join(f"{p.cluster.n_gpus:,} x {p.cluster.accelerator.title}" for p in fleet.parts)
    return (
        f"{result.scenario}: {first.shape.name} on {held}, {first.schedule.name}, {shown}, "
        f"{first.schedule.microbatches} micro-batches"
    )


def _summary(fleet: PreparedFleet, result: Result) -> str:
    from moesim.cli.report import breakdown_lines, figures, footing_lines, reason_lines

    peaks = [p.cluster.n_gpus * p.cluster.accelerator.peak_flop_per_s("bf16") for p in fleet.parts]
    rows = figures(result, sum(peaks) / fleet.n_gpus / 1e12)
    return "\n".join(
        [
            _headline(fleet, result),
            "",
            *(f"{name:<12}{text}" for name, text in rows.items()),
            "",
            *pool_lines(result.pools),
            "",
            *breakdown_lines(result),
            "",
            *reason_lines(result),
            "",
            *footing_lines(result),
        ]
    )


HEADERS = ("pool", "GPUs", "ranks", "layers", "ms a layer", "bubble s", "GiB", "profile")


def _cells(pool: PoolResult) -> tuple[str, ...]:
    memory = pool.memory
    fits = "" if memory.fits else " DOES NOT FIT"
    return (
        pool.accelerator,
        f"{pool.n_gpus:,}",
        f"{pool.first_rank} to {pool.last_rank}",
        str(pool.layers),
        f"{1e3 * pool.layer_s:.2f}",
        f"{pool.bubble_s:.2f}",
        f"{memory.total_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f}{fits}",
        pool.profile,
    )


def pool_lines(pools: tuple[PoolResult, ...]) -> list[str]:
    """What each pool does, as lines of text."""
    rows = [HEADERS, *(_cells(pool) for pool in pools)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEADERS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def print_pools(pools: tuple[PoolResult, ...]) -> None:
    """What each pool does, as a table."""
    from moesim.cli.console import print_table

    print_table(HEADERS, [_cells(pool) for pool in pools], right=(1, 3, 4, 5))


def print_verdict(result: PlanResult) -> None:
    """What each pool does in the best plan, and whether the mix is worth it."""
    from moesim.cli.console import print_text

    print_text("\npools of the best plan")
    print_pools(result.best.pools)
    if result.fleet is not None:
        print_text("\nis the mix worth it?")
        print_text("\n".join(f"  {sentence}" for sentence in result.fleet.sentences))
