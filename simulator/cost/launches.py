"""Launch stalls: the calls of a block in order, and the seconds in which compute waits for the host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from math import fsum
from typing import Literal, NamedTuple

from msgspec import Struct

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.host import BlockFamily, CallKind, Host, load_host
from moesim.simulator.common.bounded_cache import Same
from moesim.simulator.cost.data_parallel import parts_of
from moesim.simulator.cost.evidence import Evidence
from moesim.simulator.cost.pricing import Pricer
from moesim.simulator.cost.table import (
    NO_COMPUTE,
    Compute,
    Mode,
    PhaseCost,
    PhaseKey,
    Transfers,
    compute_of_pass,
)
from moesim.simulator.dispatchers.registry import dispatcher
from moesim.simulator.frameworks.software import GraphPart, Software
from moesim.simulator.model.block import BlockShape
from moesim.simulator.model.calls import Calls, calls_of, parameters_of
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.repeated import checkpoints, feed_forward_checkpoints, repeated_communication
from moesim.simulator.scenario.parallel import ParallelPlan
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.schedules.template import EP_PHASES

# -- host --------------------------------------------------------------------------------------------
# Computes launch stalls, the waits of compute for the host, by pass (pure).
#
# The equations are L1 to L8 of docs/model.md.


class HostTimes(Struct, frozen=True):
    """Host seconds of the calls of one kind of block, all times multiplied by `slowness`.

    `compiled`: `torch.compile` compiled the block.
    """

    host: Host
    family: BlockFamily = "other"
    slowness: float = 1.0
    compiled: bool = False

    def call_s(self, kind: CallKind, forward: bool) -> float:
        """Host seconds of one call, forward or of its backward part."""
        return self.slowness * self.host.call_s(kind, forward, self.family, self.compiled)


class Launch(NamedTuple):
    """Host seconds to launch a piece of work, and device seconds that it then takes."""

    host_s: float
    device_s: float
    reads: bool = False
    """Whether the host first reads a result of all work before it, which empties the queue again."""
    after: int | None = None
    """The launch of the pass whose result the host reads first, while the device goes on with later ones."""


Part = Literal["F", "B", "I", "W", "FB"]
"""A forward, a whole backward, its parts for inputs and for weights where a schedule splits it, or a pair of
both whose launches one thread makes in turn."""


class PassLaunches(Struct, frozen=True):
    """The launches of one block's forward, backward or part of a split backward, in order.

    `drains`: the host reads a result from the device before the first launch, which empties the queue.
    `waits_s`: host seconds with an empty queue, which nothing hides. `blocking`: each launch waits for the
    kernel before it.
    """

    launches: tuple[Launch, ...]
    drains: bool = False
    part: Part = "F"
    waits_s: float = 0.0
    blocking: bool = False


def host_seconds(calls: Iterable[Calls], host: HostTimes, extra_s: float = 0.0) -> float:
    """Eq. L1: host seconds of some calls; `extra_s` is added to each call that does forward work."""
    return fsum(c.times * (host.call_s(c.kind, c.forward) + extra_s * c.forward) for c in calls)


def launch_stall_s(one: PassLaunches) -> float:
    """Eq. L2, L3, L7 and L8: seconds in which the device is idle because the next launch has not arrived.

    Without a drained queue the host is ahead by whole blocks, and only the sums matter. After a drained queue
    the device restarts with the first launch, and no work can start before its own launch. A further read
    holds the host until the device is done.
    """
    device = fsum(launch.device_s for launch in one.launches)
    if one.blocking:
        return one.waits_s + fsum(launch.host_s for launch in one.launches)
    if one.part == "FB":
        return one.waits_s + max(0.0, _pair_s(one.launches) - device)
    if not one.drains:
        return one.waits_s + max(0.0, fsum(launch.host_s for launch in one.launches) - device)
    clock = done = 0.0
    for launch in one.launches:
        clock = (max(clock, done) if launch.reads else clock) + launch.host_s
        done = max(done, clock) + launch.device_s
    return one.waits_s + done - device


PAIRS = 4
"""Pairs in a row after which one takes as long as the next."""


def _pair_s(launches: Sequence[Launch]) -> float:
    """Seconds from the end of a pair's work to that of the next, where the host never empties the queue."""
    clock = done = before = 0.0
    for _ in range(PAIRS):
        before = done
        ends: list[float] = []
        for launch in launches:
            if launch.after is not None:
                clock = max(clock, ends[launch.after])
            clock += launch.host_s
            done = max(done, clock) + launch.device_s
            ends.append(done)
    return done - before


# -- launches ----------------------------------------------------------------------------------------
# Launch stalls of a block: its calls in order, and the seconds in which compute waits for the host.

FORWARD: tuple[Phase, ...] = ("dispatch F", "mlp F", "combine F", "attn F")
"""Phases of the forward, from one read of the token counts to the next."""
BACKWARD: tuple[Phase, ...] = ("combine B", "mlp I", "mlp W", "dispatch B", "attn I", "attn W")
SOFTMAX = ("gqa", "sliding", "chunked")
"""Kinds of attention whose eager blocks make about the calls of the measured ones."""
BLOCK_BEGINS: dict[bool, Phase] = {True: "attn F", False: "combine B"}
"""Phase before which a block's hooks run, forward and backward. A forward's launches begin in the middle of a
block, with the read of the token counts, and come to the next block's hooks when the experts are launched.
Those of a backward that routes again begin behind its router."""
ROUTED_AGAIN = "gate.select.recompute"
"""Last operator before the read of the token counts in a backward that routes again."""
FEED_FORWARD: dict[bool, Phase] = {True: "mlp F", False: "mlp I"}
BESIDE_POLLING = 0.6
"""Further time of a thread whose core has a second busy one, which adds 25 % to its throughput (15 to 30 %:
Marr et al., Intel Technology Journal 6(1), 2002)."""
FLEX: dict[CallKind, CallKind] = {"megatron dispatcher": "megatron flex"}
"""Calls of Megatron core that differ where kernels of their own dispatch, not NCCL."""
COLLECTIVES_PER_HALF = 2
"""Tensor-parallel collectives that half a layer starts in a phase: an all-gather and a reduce-scatter."""


def launch_stalls(
    pricer: Pricer,
    kind: BlockKind,
    compute: Compute,
    transfer: Transfers,
    modes: Sequence[Mode],
    *,
    evidence: bool = True,
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block with its launch stalls, spread in proportion to its phases; empty without a host.

    `evidence`: whether the prices say that they contain launches. Raises InputError for an unknown host.
    """
    software = pricer.scenario.software
    if software.host is None and software.launch_blocking:
        raise InputError(
            "software.launch_blocking=true without a host: what the host takes to launch each kernel is not "
            "known; name one in software.host (`moesim hardware`), or set launch_blocking: false",
            key="software.host",
        )
    if software.host is None or "all" in software.cuda_graphs:
        return {}
    host = _host(pricer, software.host)
    note = f"host {host.name}: calls of {software.modules} are counted from the operator list"
    shared = polled_share(pricer)
    polled = (
        f"{shared:.0%} of the cores poll for {pricer.scenario.communication.kernels}; a launching thread is "
        f"assumed to share a core with them so often, and then takes {BESIDE_POLLING:.0%} longer"
    )
    slowest = (1.0 + BESIDE_POLLING) / (1.0 + shared * BESIDE_POLLING) if shared else 1.0
    counted = Evidence.of([], [note, *([polled] if shared else [])])
    out: dict[PhaseKey, PhaseCost] = {}
    for paired in (False, True):
        chosen = [mode for mode in modes if (mode != "alone") == paired]
        passes: Sequence[PassLaunches] = ()
        if chosen and paired and software.modules == "megatron-core":
            passes = (pair_launches(pricer, host, kind, compute),)
        elif chosen:
            passes = pass_launches(pricer, host, kind, compute, {} if paired else transfer)
        for launches in passes:
            wait_s = launch_stall_s(launches)
            for mode in chosen:
                own = _compute_of_part(compute, kind, mode, launches.part)
                total = fsum(cost.seconds for cost in own.values())
                for key, cost in own.items():
                    part = wait_s * cost.seconds / total if total else 0.0
                    if wait_s > 0.0:
                        fixed_s, worst_s = cost.fixed_s + part, cost.worst_s + part * slowest
                        cost = replace(cost, fixed_s=fixed_s, host_s=part, worst_s=worst_s)
                    out[key] = replace(cost, evidence=cost.evidence | counted) if evidence else cost
    return out


def least_host_s(pricer: Pricer, kind: BlockKind) -> tuple[float, float]:
    """Least seconds of a block's forward and whole backward, those of the host's calls for its operators.

    0 without a host. What pipeline, sharded parameters and checkpoints of modules add is left out.
    """
    software = pricer.scenario.software
    if software.host is None or "all" in software.cuda_graphs:
        return 0.0, 0.0
    block, plan = pricer.shape.block(kind), pricer.scenario.parallel
    times = host_times(pricer, _host(pricer, software.host), block)
    routed = "gate" in {op.name for op in pricer.operators(kind).get("attn F", ())}
    exchange: CallKind = "exchange" if software.modules == "torch" else "collective"

    def least_s(forward: bool, phases: tuple[Phase, ...]) -> float:
        parts = [s for phase in phases for _, s in _calls_of_phase(pricer, times, kind, phase, 0.0)]
        if routed and plan.ep > 1:
            parts += [times.call_s(exchange, forward) for phase in phases if phase in EP_PHASES]
        return fsum(parts) + (not software.parameters_copied) * around_block_s(pricer, block, times, forward)

    return least_s(True, FORWARD), least_s(False, BACKWARD)


def _host(pricer: Pricer, name: str) -> Host:
    """The host of a scenario, read once."""
    return pricer.host_calls(("host", name), lambda: load_host(pricer.scenario.path(name)))


def _compute_of_part(compute: Compute, kind: BlockKind, mode: Mode, part: Part) -> dict[PhaseKey, PhaseCost]:
    own = compute_of_pass(compute, kind, mode, part in ("F", "FB"))
    if part == "FB":
        return own | compute_of_pass(compute, kind, mode, False)
    if part in ("F", "B"):
        return own
    return {key: cost for key, cost in own.items() if key[1].endswith(" W") == (part == "W")}


def pass_launches(
    pricer: Pricer, host: Host, kind: BlockKind, compute: Compute, transfer: Transfers
) -> tuple[PassLaunches, ...]:
    """Launches of one block's forward and backward, with the transfers that run without other compute.

    A backward that PyTorch splits has two passes: its first part walks the whole graph, and its second starts
    autograd once for every parameter.
    """
    block = pricer.shape.block(kind)
    times = host_times(pricer, host, block)
    action = action_of(pricer, block)
    passes = []
    for forward in (True, False):
        launches, drains = _pass(pricer, times, kind, compute, transfer, forward)
        around = Launch(action.per_block * times.call_s(action.kind, forward), 0.0) if action else None
        waits_s = around.host_s if around and action and action.drains else 0.0
        if around and not waits_s:
            launches.insert(1 if drains else 0, around)
        of_pass: tuple[Phase, ...] = ("gather F",) if forward else ("gather B", "scatter W")
        if pricer.scenario.parallel.zero_stage == 3:
            copies = fsum(parts_of(pricer, kind, phase).copies for phase in of_pass)
            waits_s += copies * times.call_s("part", forward)
        blocking = pricer.scenario.software.launch_blocking
        passes.append(PassLaunches(tuple(launches), drains, "F" if forward else "B", waits_s, blocking))
    if action is None or not action.split:
        return tuple(passes)
    return (passes[0], *_split(pricer, times, kind, passes[1], compute))


def host_times(pricer: Pricer, host: Host, block: BlockShape) -> HostTimes:
    """Host times of a block under the scenario's trainer."""
    software = pricer.scenario.software
    compiled = software.compiled_blocks and block.layer is not None
    collector, slowness = host.measured().collector, software.host_slowness
    if software.garbage_collection == "automatic" and collector is not None:
        slowness *= 1.0 + collector.share
    slowness *= 1.0 + polled_share(pricer) * BESIDE_POLLING
    return HostTimes(host, block_family(block, software), slowness, compiled)


def _pass(
    pricer: Pricer, times: HostTimes, kind: BlockKind, compute: Compute, transfer: Transfers, forward: bool
) -> tuple[list[Launch], bool]:
    """Launches of a whole pass, and whether the host reads token counts before the first."""
    scenario = pricer.scenario
    software, plan, block = scenario.software, scenario.parallel, pricer.shape.block(kind)
    operators = pricer.operators(kind)
    routed = "gate" in {op.name for op in operators.get("attn F", ())}
    reads_counts = software.static_experts is None and software.expert_reads != "none"
    drains = routed and reads_counts and (plan.ep > 1 or software.modules != "torch")
    again = repeated_communication(block, scenario.recompute, software.op_keeps_transfers)
    drains = drains and (forward or again.experts)
    policy = measured_checkpoint(block, scenario.recompute, software)
    exchange: CallKind = "exchange" if software.modules == "torch" else "collective"
    launches: list[Launch] = []
    around = Launch(around_block_s(pricer, block, times, forward), 0.0)
    inner = feed_forward_checkpoints(block, scenario.recompute)
    inner_s = inner * times.call_s(module_checkpoint(software), forward)
    extra = times.call_s(policy, forward) if policy else 0.0
    read = 0  # launches before the host reads the counts
    for phase in FORWARD if forward else BACKWARD:
        if phase == BLOCK_BEGINS[forward]:
            launches.append(around)
        if phase == FEED_FORWARD[forward]:
            launches.append(Launch(inner_s, 0.0))
        price = compute.get((kind, phase, "alone"), NO_COMPUTE)
        names = [op.name for op in operators.get(phase, ())]
        if drains and ROUTED_AGAIN in names:
            read = len(launches) + names.index(ROUTED_AGAIN) + 1
        launches += _phase_launches(pricer, times, kind, phase, price, extra)
        if phase in EP_PHASES and routed and plan.ep > 1:
            moved = transfer.get((kind, phase, "alone"))
            device_s = 0.0 if moved is None else moved.launch_s + moved.payload_s
            launches.append(Launch(times.call_s(exchange, forward), device_s))
        if phase == "combine F" and drains and software.expert_reads == "selection":
            launches.append(Launch(times.call_s("index", True), 0.0, reads=True))
    if drains:
        launches = [Launch(times.call_s("counts", True), 0.0), *launches[read:], *launches[:read]]
    elif held := next((n for n, launch in enumerate(launches, 1) if launch.reads), 0):
        # From one read to the next block's.
        drains, launches = True, [*launches[held:], *launches[: held - 1]]
    return launches, drains


PAIR: tuple[Phase, ...] = (
    "combine B", "attn F", "mlp I", "dispatch F", "mlp W", "dispatch B", "mlp F", "combine F", "attn I",
    "attn W",
)  # fmt: skip
"""Order in which Megatron core launches a pair (NVIDIA/Megatron-LM@core_v0.17.1
megatron/core/models/common/model_chunk_schedule_plan.py, `TransformerLayerSchedulePlan.run`)."""


def pair_launches(pricer: Pricer, host: Host, kind: BlockKind, compute: Compute) -> PassLaunches:
    """Launches of a forward and a backward of a block that Megatron core interleaves (eq. L7).

    The host reads the token counts behind the forward's router, on a stream of their own, and the device goes
    on with the backward's experts meanwhile. A dense block reads nothing.
    """
    scenario, block = pricer.scenario, pricer.shape.block(kind)
    times, action = host_times(pricer, host, block), action_of(pricer, block)
    inner = feed_forward_checkpoints(block, scenario.recompute)
    routed = "gate" in {op.name for op in pricer.operators(kind).get("attn F", ())}
    launches: list[Launch] = []
    routing = 0
    for phase in PAIR:
        forward = phase.endswith(" F")
        if phase == BLOCK_BEGINS[forward]:
            around_s = around_block_s(pricer, block, times, forward)
            around_s += action.per_block * times.call_s(action.kind, forward) if action else 0.0
            launches.append(Launch(around_s, 0.0))
        if phase == FEED_FORWARD[forward]:
            launches.append(Launch(inner * times.call_s("checkpoint", forward), 0.0))
        reads = scenario.software.static_experts is None and scenario.software.expert_reads != "none"
        if phase == "dispatch F" and routed and reads:
            launches.append(Launch(times.call_s("counts", True), 0.0, after=routing))
        price = compute.get((kind, phase, "alone"), NO_COMPUTE)
        launches += _phase_launches(pricer, times, kind, phase, price, 0.0)
        if phase in EP_PHASES and routed:
            launches.append(Launch(times.call_s("collective", forward), 0.0))
        if phase == "attn F":
            routing = len(launches) - 1
    return PassLaunches(tuple(launches), part="FB")


def _split(
    pricer: Pricer, times: HostTimes, kind: BlockKind, whole: PassLaunches, compute: Compute
) -> tuple[PassLaunches, PassLaunches]:
    """The parts of a backward for inputs, which has all its calls, and for weights."""
    operators = [op for ops in pricer.operators(kind).values() for op in ops]
    own = _compute_of_part(compute, kind, "alone", "W")
    device_s = fsum(cost.seconds for cost in own.values())
    weights = sum(parameters_of(op) for op in operators) * times.call_s("split weights", False)
    total = fsum(launch.device_s for launch in whole.launches)
    share = 1.0 - device_s / total if total else 1.0  # of the device's time, left for the first part
    inputs = tuple(launch._replace(device_s=launch.device_s * share) for launch in whole.launches)
    return (
        PassLaunches(inputs, whole.drains, "I", whole.waits_s, whole.blocking),
        PassLaunches((Launch(weights, device_s),), False, "W", 0.0, whole.blocking),
    )


# -- pipeline ----------------------------------------------------------------------------------------


class PipelineAction(NamedTuple):
    """What a trainer's schedule adds to the host's work on a block in each action.

    `per_block`: share of an action's time; `drains`: the host waits for the device behind the action's
    exchange; `split`: backwards are run in two parts.
    """

    kind: CallKind
    per_block: float
    drains: bool
    split: bool


ONE_STAGE = ("gpipe", "1f1b")
"""Schedules that PyTorch runs without its runtime of several stages a rank."""
SPLIT = ("interleaved-zero-bubble", "zbv")
"""Schedules that split every backward; DualPipeV, which splits some, is priced as if it split none."""


def action_of(pricer: Pricer, block: BlockShape) -> PipelineAction | None:
    """Eq. L6: the trainer's own work in an action, as a share of each block; None without a pipeline."""
    s = pricer.scenario
    return None if block.layer is None else _action(s.software, s.parallel, s.schedule, pricer.shape.n_layers)


def _action(software: Software, plan: ParallelPlan, schedule: str, n_layers: int) -> PipelineAction | None:
    """What a pipeline adds to the host's work on a block of a layer.

    Megatron core's 1F1B without interleaving calls `torch.cuda.synchronize` behind every exchange
    (NVIDIA/Megatron-LM@core_r0.17.0 megatron/core/pipeline_parallel/p2p_communication.py, `batch_p2p_sync`).
    """
    if plan.pp == 1 or software.modules == "transformer-engine":
        return None
    chunks = SCHEDULES[schedule].stages_per_rank or plan.vpp
    share = min(1.0, plan.pp * chunks / n_layers)
    if software.modules == "megatron-core":
        return PipelineAction("megatron action", share, schedule in ONE_STAGE, False)
    kind: CallKind = "pipeline action" if schedule in ONE_STAGE else "runtime action"
    return PipelineAction(kind, share, False, schedule in SPLIT)


def stalls_key(software: Software, plan: ParallelPlan, schedule: str, n_layers: int) -> Hashable:
    """What decides launch stalls beside how a plan splits layers and what moves inside its step."""
    return _action(software, plan, schedule, n_layers), software.parameters_copied and plan.zero_stage > 0


# -- around blocks -----------------------------------------------------------------------------------


def polled_share(pricer: Pricer) -> float:
    """Share of the host's cores that a dispatcher's polling threads hold (eq. L5); 0 where cores are unknown.

    They are pinned, and the launching thread may run on any hardware thread, beside one of them too.
    """
    node, plan = pricer.cluster.node, pricer.scenario.parallel
    threads = dispatcher(pricer.scenario.communication.kernels).host_threads
    if node.cores is None or node.adapter is None or plan.ep == 1 or pricer.ep_nodes == 1:
        return 0.0
    return min(1.0, threads * node.n_gpus / node.cores.n)


def block_family(block: BlockShape, software: Software) -> BlockFamily:
    """The kind of block whose measured time prices this one; `other` where none like it was measured."""
    as_written = software.kernels == "eager" or software.compiled_blocks
    if block.layer is None or software.modules != "torch" or not as_written:
        return "other"
    attention = block.layer.attention.kind
    if attention == "mla":
        return "latent routed" if block.routed else "other"
    if attention not in SOFTMAX:
        return "other"
    return "routed" if block.routed else "dense"


def module_checkpoint(software: Software) -> CallKind:
    """The call that checkpoints a module by itself."""
    return "megatron module" if software.modules == "megatron-core" else "checkpoint"


def traces_checkpoint(block: BlockShape, software: Software) -> bool:
    """Whether the compiler takes a block's checkpoint into its graphs, so that no policy runs on the host.

    torchtitan compiles a dense block as a whole, and the parts of a routed one inside its checkpoint
    (0.2.2, `models/llama4/infra/parallelize.py`, `apply_compile`).
    """
    return software.compiled_blocks and block.layer is not None and not block.routed


def measured_checkpoint(block: BlockShape, recompute: Recompute, software: Software) -> CallKind | None:
    """The extra cost of each call under PyTorch's own checkpoints of a block, whole or by operator.

    None where a framework's checkpoint, which hooks no tensor, or no whole block is checkpointed.
    """
    kinds: dict[Recompute, CallKind] = {"full": "recomputed", "op": "selective"}
    eager = software.modules == "torch" and software.kernels == "eager"
    if block.layer is None or not isinstance(recompute, str) or not (eager or recompute == "op"):
        return None
    if traces_checkpoint(block, software):
        return None
    return kinds.get(recompute)


def around_block_s(pricer: Pricer, block: BlockShape, times: HostTimes, forward: bool) -> float:
    """Eq. L4: host seconds of a block's checkpoints, parameter sharding, tensor parallelism and graphs.

    Checkpoints inside the feed-forward half are left out. Experts that expert parallelism spreads are a unit
    of FSDP2 of their own.
    """
    scenario = pricer.scenario
    software, plan, recompute = scenario.software, scenario.parallel, scenario.recompute
    seconds = 0.0
    traced = traces_checkpoint(block, software)
    if measured_checkpoint(block, recompute, software) is None and not traced:
        outer = checkpoints(block, recompute) - feed_forward_checkpoints(block, recompute)
        again = block.routed and recompute == "full" and software.modules == "megatron-core"
        of_layer: CallKind = "megatron checkpoint" if again else "checkpoint"
        own = of_layer if isinstance(recompute, str) else module_checkpoint(software)
        seconds += outer * times.call_s(own, forward)
    if plan.zero_stage and software.parameters_copied:
        held: CallKind = "fsdp" if plan.zero_stage == 3 else "fsdp kept"
        seconds += (1 + (block.routed and plan.ep > 1)) * times.call_s(held, forward)
    elif plan.zero_stage == 3:
        seconds += times.call_s("collective", True)
        seconds += 0.0 if forward else times.call_s("collective", False)
    if plan.zero_stage != 3 and pricer.gradient_sync.in_backward and not forward:
        seconds += times.call_s("collective", False)
    if block.layer is not None:
        seconds += (recompute == "op" and not traced) * times.call_s("policy", forward)
        seconds += (plan.tp > 1 and software.dtensor) * times.call_s("dtensor", forward)
        seconds += bool(software.cuda_graphs) * times.call_s("graph", forward)
    return seconds


def _phase_launches(
    pricer: Pricer,
    times: HostTimes,
    kind: BlockKind,
    phase: Phase,
    price: PhaseCost,
    extra_s: float,
) -> list[Launch]:
    """Launches of one phase, scaled to the table's seconds; the collectives inside it come last."""
    software, plan = pricer.scenario.software, pricer.scenario.parallel
    alone = [cost.seconds for cost in pricer.operator_costs(kind, phase, "alone")]
    total = fsum(alone)
    factor = (price.seconds - price.exposed_s) / total if total else 0.0
    launches = []
    calls = _calls_of_phase(pricer, times, kind, phase, extra_s)
    for (reads, host_s), seconds in zip(calls, alone, strict=True):
        launches += reads
        launches.append(Launch(host_s, seconds * factor))
    if price.exposed_s > 0.0:
        own = plan.tp > 1 and not software.dtensor
        seconds = times.call_s("collective", True)
        if software.modules == "megatron-core":
            seconds = times.call_s("megatron tensor", phase.endswith(" F"))
        launches.append(Launch(own * COLLECTIVES_PER_HALF * seconds, price.exposed_s))
    return launches


def _calls_of_phase(
    pricer: Pricer, times: HostTimes, kind: BlockKind, phase: Phase, extra_s: float
) -> tuple[tuple[list[Launch], float], ...]:
    """`_operator_calls`, once for the same operators and times."""
    operators = Same(pricer.operators(kind).get(phase, ()))
    key = (operators, kind, phase, extra_s, times.family, times.slowness, times.compiled)
    return pricer.host_calls(key, lambda: _operator_calls(pricer, times, kind, phase, extra_s))


def _operator_calls(
    pricer: Pricer, times: HostTimes, kind: BlockKind, phase: Phase, extra_s: float
) -> tuple[tuple[list[Launch], float], ...]:
    """Reads of the device before each operator of a phase, and the host's seconds for its calls."""
    software, found = pricer.scenario.software, []
    traced = traces_checkpoint(pricer.shape.block(kind), software)
    flex = not dispatcher(pricer.scenario.communication.kernels).by_library
    for op in pricer.operators(kind).get(phase, ()):
        part: GraphPart = "attention" if phase.startswith("attn") else "experts"
        if op.cls in ("gate_gemm", "topk"):
            part = "router"
        unseen = part in software.cuda_graphs or (traced and op.recompute)
        calls = () if unseen else calls_of(op, software.modules)
        if flex:
            calls = tuple(c._replace(kind=FLEX.get(c.kind, c.kind)) for c in calls)
        host_s = host_seconds(calls, times, extra_s)
        if software.launch_blocking:
            host_s += times.call_s("blocked", True) * fsum(c.times for c in calls)
        reads = device_reads(op, software) if part not in software.cuda_graphs else []
        found.append((reads, host_s))
    return tuple(found)


def device_reads(op: Operator, software: Software) -> list[Launch]:
    """Reads of the device before an operator, beside those of token counts.

    Biases of experts that are repeated by row take three: `repeat_interleave` checks its counts and reads
    their sum, and the last offset becomes a Python number (torchtitan 0.2.2
    torchtitan/models/gpt_oss/model/moe.py, `_run_experts_grouped_mm`). Megatron core copies the offset of its
    clamped activation from pageable memory, and the copy waits for the stream (NVIDIA/Megatron-LM@d7288711b
    megatron/core/fusions/fused_bias_geglu.py, `torch.tensor(linear_offset, device=input.device)`; behind
    15 ms of work it took the host 13 ms, lab/results/2026-11-26-h100-megatron-clamped.json.xz).
    """
    repeated = software.expert_biases == "repeated" and op.name in (
        "experts.gate_up.bias",
        "experts.down.bias",
    )
    return [Launch(0.0, 0.0, reads=True)] if repeated or op.variant == "clamps_forward" else []
