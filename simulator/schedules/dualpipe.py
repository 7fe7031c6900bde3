"""DualPipe and DualPipeV: pipelines of overlapped forward-backward pairs (DeepSeek-V3, arXiv 2412.19437).

DualPipe is bidirectional; DualPipeV is half of it, whose single direction is folded into a V with one copy of
each stage. Both follow the eight steps of deepseek-ai/DualPipe at 3da1bbea5360.
"""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.schedules.action import Schedule, Step, bidirectional_routes, v_route
from moesim.simulator.schedules.spec import Chunk, RankWriter, ScheduleSpec, check_microbatches, every
from moesim.simulator.schedules.timeline import Durations


def eight_steps(own: Chunk, other: Chunk, position: int, depth: int, chunks: int) -> tuple[Step, ...]:
    """Build the steps of one rank.

    `own` is (stage, first micro-batch) of the direction that enters nearer to this rank, `other` that of the
    opposite direction. `position` counts ranks from the nearer entry, `depth` is the number of positions up
    to the turning point, and `chunks` is the number of micro-batches of one direction, at least 2 * depth.
    """
    writer = RankWriter()
    before_turn = depth - 1 - position
    for _ in range(2 * before_turn):  # 1: fill
        writer.put(own, "F")
    for _ in range(position + 1):  # 2: both directions meet
        writer.put(own, "F")
        writer.put(other, "F")
    for _ in range(before_turn):  # 3: first backwards, weight gradients fill the gaps
        writer.put_input_gradient(other)
        writer.put_deferred_weight()
        writer.put(other, "F")
    for index in range(chunks - 2 * depth + position + 1):  # 4: overlapped pairs
        if index == 0 and before_turn == 0:
            # At the turning point the first pair is not overlapped: its forward need not wait for the
            # backward's input, which arrives later, and the bubble becomes smaller.
            writer.put(own, "F")
            writer.put(other, "B")
        else:
            writer.put_overlap(own, other)
        writer.put_overlap(other, own)
    for _ in range(before_turn):  # 5: the own direction has no forwards left
        writer.put(other, "B")
        writer.put_overlap(other, own)
    for index in range(2 * (position + 1)):  # 6: backwards only, the second half of them split
        chunk = own if index % 2 else other
        if index <= position:
            writer.put(chunk, "B")
        else:
            writer.put_input_gradient(chunk)
    for _ in range(before_turn):  # 7: weight gradients while waiting for the last backwards
        writer.put_deferred_weight()
        writer.put_input_gradient(own)
    for _ in range(position + 1):  # 8: the weight gradients left over
        writer.put_deferred_weight()
    return tuple(writer.steps)


def check_dualpipe(pp: int, microbatches: int) -> None:
    """Raise InputError, with the nearest legal sizes, for odd ranks and too few or odd micro-batches."""
    if pp % 2:
        near = [p for p in (pp - 1, pp + 1) if p]
        raise InputError(
            f"schedule dualpipe: pp={pp} is odd, but ranks work in mirrored pairs; nearest legal: "
            f"{', '.join(map(str, near))}.",
            key="parallel.pp",
            nearest=near,
        )
    rule = f"half of them enter at each end and the eight steps need at least 2 pp = {2 * pp}"
    check_microbatches("dualpipe", microbatches, 2 * pp, lambda m: m % 2 == 0, rule)


def build_dualpipe(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order for even pp and an even number of micro-batches >= 2 pp.

    Each direction numbers its own stages, so rank r holds stages r and pp - 1 - r. Micro-batches 0..M/2-1
    enter at rank 0 and M/2..M-1 at the last rank.
    """
    half = microbatches // 2
    ranks = []
    for rank in range(pp):
        position = min(rank, pp - 1 - rank)
        near_end = 0 if rank < pp // 2 else half  # first micro-batch entering at this rank's end
        own = (position, near_end)
        other = (pp - 1 - position, half - near_end)
        ranks.append(eight_steps(own, other, position, depth=pp // 2, chunks=half))
    return Schedule("dualpipe", microbatches, bidirectional_routes(pp), tuple(ranks))


def bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp/2 - 1)(F&B + B - 3W), full backward B and overlapped pair F&B (arXiv 2412.19437, table 2)."""
    return (pp / 2 - 1) * pair_gap(durations)


def pair_gap(durations: Durations) -> float:
    """Bubble that each rank after the first of a direction adds: F&B + B - 3W."""
    return durations.overlap + durations.backward - 3 * durations.weight_gradient


def check_dualpipev(pp: int, microbatches: int) -> None:
    """Raise InputError, with the nearest legal number, for too few micro-batches."""
    rule = f"the eight steps need at least one micro-batch a stage, 2 pp = {2 * pp}"
    check_microbatches("dualpipev", microbatches, 2 * pp, lambda m: True, rule)


def build_dualpipev(pp: int, microbatches: int, vpp: int = 1) -> Schedule:
    """Build the order with stages r and 2 pp - 1 - r on rank r, for micro-batches >= 2 pp.

    The number of micro-batches may be odd, as in deepseek-ai/DualPipe (dualpipev.py at 3da1bbea5360) and
    PyTorch 2.13.
    """
    ranks = []
    for rank in range(pp):
        down, up = (rank, 0), (2 * pp - 1 - rank, 0)
        ranks.append(eight_steps(down, up, rank, depth=pp, chunks=microbatches))
    return Schedule("dualpipev", microbatches, (v_route(pp),), tuple(ranks))


def folded_bubble(pp: int, durations: Durations, vpp: int) -> float:
    """(pp - 1)(F&B + B - 3W), DualPipe's row for 2 pp stages on pp ranks.

    Source: deepseek-ai/DualPipe at 3da1bbea5360, README.
    """
    return (pp - 1) * pair_gap(durations)


DUALPIPE = ScheduleSpec(
    "dualpipe",
    build_dualpipe,
    check_sizes=check_dualpipe,
    microbatch_step=every(2),
    bubble=bubble,
    bidirectional=True,
    overlapped_pairs=True,
    awaits_sends=True,
)
DUALPIPEV = ScheduleSpec(
    "dualpipev",
    build_dualpipev,
    stages_per_rank=2,
    check_sizes=check_dualpipev,
    microbatch_step=every(1),
    bubble=folded_bubble,
    overlapped_pairs=True,
    awaits_sends=True,
    names_elsewhere={"torch": "DualPipeV"},
)
