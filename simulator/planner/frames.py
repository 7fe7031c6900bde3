"""Finds the legal combinations of parallel degrees, schedule and micro-batch size in a space."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from msgspec import Struct

from moesim.hwmodels.cluster import Cluster
from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.dispatch_limits import check_domains, check_group, check_kernels
from moesim.simulator.layout.parallel import Layout, check_against_model, check_expert_overlap, microbatches
from moesim.simulator.memory.gpu import RankStages, rank_stages
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.planner.refusals import Refusals
from moesim.simulator.planner.replay import Pattern, pattern
from moesim.simulator.planner.space import Space
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import SCHEDULES, Awaited, build


class Frame(Struct, frozen=True):
    """A plan without precision, recompute policy, communication SMs and ZeRO stage."""

    plan: ParallelPlan
    schedule: str
    microbatches: int
    layout: Layout
    pattern: Pattern

    @property
    def in_flight(self) -> tuple[RankStages, ...]:
        """Fullest moments of every rank, from the whole schedule if they grow with the micro-batches."""
        early, late = self.pattern.in_flight[0], self.pattern.in_flight[-1]
        whole = (self.schedule, self.plan.pp, self.microbatches, self.plan.vpp)
        return late if early == late else _whole_schedule(*whole)

    @property
    def label(self) -> str:
        """Degrees and schedule in the field's shorthand, such as TP1 PP8 EP64."""
        p = self.plan
        parts = [f"TP{p.tp} PP{p.pp} EP{p.ep} CP{p.cp} VPP{p.vpp} MBS{p.microbatch}"]
        return " ".join([*parts, *([f"ETP{p.expert_tp}"] if p.expert_tp > 1 else []), self.schedule])


@lru_cache(maxsize=512)
def _whole_schedule(name: str, pp: int, microbatches: int, vpp: int) -> tuple[RankStages, ...]:
    return tuple(rank_stages(build(name, pp, microbatches, vpp)))


def legal_frames(
    space: Space,
    shape: ModelShape,
    cluster: Cluster,
    sequences: int,
    sequence: int,
    kernels: str,
    awaited: Awaited = "schedule",
) -> tuple[list[Frame], Refusals]:
    """Every frame that layout, model, batch and schedule accept, and the reasons why others were refused.

    `kernels`: the dispatcher that must serve its expert-parallel groups. `awaited`: see `pattern`.

    Refusals count plans: a refused frame counts once for each precision, recompute policy, number of SMs,
    ZeRO stage and placement that it would have had.
    """
    refused = Refusals()
    frames: list[Frame] = []
    per_batch = len(space.schedules) * space.per_frame
    per_plan = per_batch * len(space.microbatch)
    for plan, layout in _layouts(space, shape, cluster, sequence, refused, per_plan):
        for size in space.microbatch:
            sized = Layout(plan.model_copy(update={"microbatch": size}), layout.n_gpus, layout.gpus_per_node)
            try:
                check_group(kernels, cluster, sized, sequence)
                count = microbatches(sized, sequences)
            except InputError as error:
                refused.add_error(str(error), per_batch, _short(sized.plan))
                continue
            for name, vpp in space.schedules:
                problem = _schedule_problem(name, plan.pp, count, vpp)
                try:
                    if problem is not None:
                        raise InputError(problem)
                    shaped = sized.plan.model_copy(update={"vpp": vpp})
                    check_kernels(kernels, plan.ep, shape, name, SCHEDULES[name].overlapped_pairs)
                    check_expert_overlap(name, shaped, routed=shape.moe is not None)
                    steps = pattern(name, plan.pp, count, vpp, awaited)
                    if steps.n_stages > shape.n_layers:
                        check_against_model(shaped, shape, sequence, steps.n_stages)
                except InputError as error:
                    plan_text = f"{_short(sized.plan)} VPP{vpp} {name}"
                    refused.add_error(str(error), space.per_frame, plan_text)
                    continue
                whole = Layout(shaped, layout.n_gpus, layout.gpus_per_node)
                frames.append(Frame(shaped, name, count, whole, steps))
    return frames, refused


def _layouts(
    space: Space, shape: ModelShape, cluster: Cluster, sequence: int, refused: Refusals, weight: int
) -> Iterator[tuple[ParallelPlan, Layout]]:
    for tp, pp, cp, ep, etp in product(space.tp, space.pp, space.cp, space.ep, space.expert_tp):
        # Megatron-LM requires sequence parallelism beside tensor parallelism for MoE models; so does moesim.
        cut = tp > 1 and space.sequence_parallel
        plan = ParallelPlan(tp=tp, pp=pp, cp=cp, ep=ep, expert_tp=etp, sequence_parallel=cut)
        try:
            layout = Layout(plan, cluster.n_gpus, cluster.node.n_gpus)
            check_against_model(plan, shape, sequence, 1)
            check_domains(ep, etp, cluster.n_gpus, cluster.node.n_gpus)
        except InputError as error:
            refused.add_error(str(error), weight, _short(plan))
            continue
        yield plan, layout


@lru_cache(maxsize=65_536)
def _schedule_problem(name: str, pp: int, count: int, vpp: int) -> str | None:
    try:
        SCHEDULES[name].check(pp, count, vpp)
    except InputError as error:
        return str(error)
    return None


def _short(plan: ParallelPlan) -> str:
    return f"TP{plan.tp} PP{plan.pp} EP{plan.ep} CP{plan.cp} MBS{plan.microbatch}"
