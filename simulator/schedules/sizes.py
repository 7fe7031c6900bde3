"""Checks the sizes of schedules; every error names the nearest legal sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesim.hwmodels.errors import InputError

MAX_CHUNKS = 1_000_000
"""Most (stage, micro-batch) pairs of one schedule; 16 ranks with 120 micro-batches have 1,920."""


def check_positive(name: str, pp: int, microbatches: int, vpp: int) -> None:
    """Raise InputError unless all three counts are at least 1 and their product is within MAX_CHUNKS."""
    for label, value in (("pp", pp), ("microbatches", microbatches), ("vpp", vpp)):
        if value < 1:
            raise InputError(f"schedule {name}: {label}={value} is below 1, the nearest legal value.")
    if pp * microbatches * vpp > MAX_CHUNKS:
        raise InputError(
            f"schedule {name}: pp={pp} x microbatches={microbatches} x vpp={vpp} is above the limit of "
            f"{MAX_CHUNKS:,} chunks; with these ranks use at most {max(1, MAX_CHUNKS // (pp * vpp)):,} "
            "micro-batches."
        )


def check_fixed_vpp(name: str, vpp: int, stages_per_rank: int, free: Sequence[str]) -> None:
    """Raise InputError if `vpp` is not the number of stages per rank of a schedule that fixes it.

    `free` names the schedules whose `vpp` the caller may choose.
    """
    if vpp not in (1, stages_per_rank):
        legal = "1" if stages_per_rank == 1 else f"{stages_per_rank} (or leave it out)"
        raise InputError(
            f"schedule {name}: vpp={vpp} is illegal, since it always holds {stages_per_rank} stage(s) a rank "
            f"and direction; nearest legal: {legal}. Schedules with a free vpp: {', '.join(free)}.",
            key="parallel.vpp",
            nearest=(1,),
        )


def check_microbatches(
    name: str, microbatches: int, minimum: int, legal: Callable[[int], bool], rule: str
) -> None:
    """Raise InputError unless `microbatches` is at least `minimum` and `legal`; the message states `rule`."""
    if microbatches >= minimum and legal(microbatches):
        return
    below = next((m for m in range(microbatches - 1, minimum - 1, -1) if legal(m)), None)
    start = max(minimum, microbatches + 1)
    above = next(m for m in range(start, 2 * start + 1) if legal(m))
    near = [m for m in (below, above) if m is not None]
    raise InputError(
        f"schedule {name}: microbatches={microbatches} is illegal: {rule}; nearest legal: "
        f"{', '.join(map(str, near))}.",
        key="microbatches",
        nearest=near,
    )
