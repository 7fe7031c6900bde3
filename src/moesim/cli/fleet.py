"""Prints the pools of a fleet for `simulate`, `explain` and `plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.simulator.planner.result import PlanResult
    from moesim.simulator.predict.result_parts import PoolResult

GIB = 2**30


def refuse_for_fleet(asked: dict[str, object]) -> None:
    """Raise InputError for options that a fleet's prediction does not support.

    `asked`: the value of every such option; None or False if it was not given.
    """
    given = [name for name, value in asked.items() if value is not None and value is not False]
    if "--uncertainty" in given:
        raise InputError(
            "--uncertainty needs one cluster: the errors of several profiles are not combined; leave it out, "
            "or give one cluster in the place of fleet"
        )
    if given:
        raise InputError(
            "traces and pictures of a fleet are not drawn: leave --trace, --trace-per-rank, --ranks, "
            "--members and --picture out, or give one cluster in the place of fleet"
        )


HEADERS = ("pool", "GPUs", "ranks", "layers", "ms a layer", "bubble s", "GiB", "profile")
NUMBERS = (1, 3, 4, 5)
"""Columns of numbers."""


def _cells(pool: PoolResult) -> tuple[str, ...]:
    memory = pool.memory
    fits = {"fits": "", "at risk": " AT RISK", "does not fit": " DOES NOT FIT"}[memory.verdict]
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
    """The pools as lines of text."""
    from moesim.cli.console import table_lines

    return table_lines(HEADERS, [_cells(pool) for pool in pools], right=NUMBERS)


def print_pools(pools: tuple[PoolResult, ...]) -> None:
    """Print the pools as a table."""
    from moesim.cli.console import print_table

    print_table(HEADERS, [_cells(pool) for pool in pools], right=NUMBERS)


def print_verdict(result: PlanResult) -> None:
    """Print the pools of the best plan, and the comparison of the fleet with each pool alone."""
    from moesim.cli.console import print_text

    print_text("\npools of the best plan")
    print_pools(result.best.pools)
    if result.fleet is not None:
        print_text("\nis the mix worth it?")
        print_text("\n".join(f"  {sentence}" for sentence in result.fleet.sentences))
