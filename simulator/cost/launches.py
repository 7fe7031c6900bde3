"""Launch stalls: the calls of a block in order, and the seconds in which compute waits for the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum

from moesim.hwmodels.host import BlockFamily, CallKind, Host, load_host
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
from moesim.simulator.model.calls import Calls, calls_of
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.recompute import Recompute
from moesim.simulator.model.repeated import checkpoints, feed_forward_checkpoints
from moesim.simulator.schedules.template import EP_PHASES

# -- host --------------------------------------------------------------------------------------------
# Computes launch stalls, the waits of compute for the host, by pass (pure).
#
# The equations are L1 to L4 of docs/model.md.


@dataclass(frozen=True, slots=True)
class HostTimes:
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


@dataclass(frozen=True, slots=True)
class Launch:
    """Host seconds to launch a piece of work, and device seconds that it then takes."""

    host_s: float
    device_s: float
    reads: bool = False
    """Whether the host first reads a result of all work before it, which empties the queue again."""


@dataclass(frozen=True, slots=True)
class PassLaunches:
    """The launches of one block's forward or backward, in order.

    `drains`: the host reads a result from the device before the first launch, which empties the queue.
    """

    launches: tuple[Launch, ...]
    drains: bool = False


def host_seconds(calls: Iterable[Calls], host: HostTimes, extra_s: float = 0.0) -> float:
    """Eq. L1: host seconds of some calls; `extra_s` is added to each call that does forward work."""
    return fsum(c.times * (host.call_s(c.kind, c.forward) + extra_s * c.forward) for c in calls)


def launch_stall_s(one: PassLaunches) -> float:
    """Eq. L2 and L3: seconds in which the device is idle because the next launch has not arrived.

    Without a drained queue the host is ahead by whole blocks, and only the sums matter. After a drained queue
    the device restarts with the first launch, and no work can start before its own launch. A further read
    holds the host until the device is done.
    """
    device = fsum(launch.device_s for launch in one.launches)
    if not one.drains:
        return max(0.0, fsum(launch.host_s for launch in one.launches) - device)
    clock = done = 0.0
    for launch in one.launches:
        clock = (max(clock, done) if launch.reads else clock) + launch.host_s
        done = max(done, clock) + launch.device_s
    return done - device


# -- launches ----------------------------------------------------------------------------------------
# Launch stalls of a block: its calls in order, and the seconds in which compute waits for the host.

FORWARD: tuple[Phase, ...] = ("dispatch F", "mlp F", "combine F", "attn F")
"""Phases of the forward, from one read of the token counts to the next."""
BACKWARD: tuple[Phase, ...] = ("combine B", "mlp I", "mlp W", "dispatch B", "attn I", "attn W")
SOFTMAX = ("gqa", "sliding", "chunked")
"""Kinds of attention whose eager blocks make about the calls of the measured ones."""
BLOCK_BEGINS: dict[bool, Phase] = {True: "attn F", False: "combine B"}
"""Phase before which a block's hooks run, forward and backward. A forward's launches begin in the middle of a
block, with the read of the token counts, and come to the next block's hooks when the experts are launched."""
FEED_FORWARD: dict[bool, Phase] = {True: "mlp F", False: "mlp I"}
BESIDE_POLLING = 0.6
"""Further time of a thread whose core has a second busy one, which adds 25 % to its throughput (15 to 30 %:
Marr et al., Intel Technology Journal 6(1), 2002)."""
COLLECTIVES_PER_HALF = 2
"""Tensor-parallel collectives that half a layer starts in a phase: an all-gather and a reduce-scatter."""


def launch_stalls(
    pricer: Pricer, kind: BlockKind, compute: Compute, transfer: Transfers, modes: Sequence[Mode]
) -> dict[PhaseKey, PhaseCost]:
    """Compute of a block with its launch stalls, spread in proportion to its phases; empty without a host.

    Raises InputError for an unknown host.
    """
    software = pricer.scenario.software
    if software.host is None or "all" in software.cuda_graphs:
        return {}
    host = load_host(pricer.scenario.path(software.host))
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
        passes = pass_launches(pricer, host, kind, compute, {} if paired else transfer) if chosen else ()
        for forward, launches in zip((True, False), passes, strict=False):
            wait_s = launch_stall_s(launches)
            for mode in chosen:
                own = compute_of_pass(compute, kind, mode, forward)
                total = fsum(cost.seconds for cost in own.values())
                for key, cost in own.items():
                    part = wait_s * cost.seconds / total if total else 0.0
                    if wait_s > 0.0:
                        fixed_s, worst_s = cost.fixed_s + part, cost.worst_s + part * slowest
                        cost = replace(cost, fixed_s=fixed_s, host_s=part, worst_s=worst_s)
                    out[key] = replace(cost, evidence=cost.evidence | counted)
    return out


def pass_launches(
    pricer: Pricer, host: Host, kind: BlockKind, compute: Compute, transfer: Transfers
) -> tuple[PassLaunches, PassLaunches]:
    """Launches of one block's forward and backward, with the transfers that run without other compute."""
    scenario = pricer.scenario
    software, plan, block = scenario.software, scenario.parallel, pricer.shape.block(kind)
    compiled = software.compiled_blocks and block.layer is not None
    collector, slowness = host.measured().collector, software.host_slowness
    if software.garbage_collection == "automatic" and collector is not None:
        slowness *= 1.0 + collector.share
    slowness *= 1.0 + polled_share(pricer) * BESIDE_POLLING
    times = HostTimes(host, block_family(block, software), slowness, compiled)
    operators = pricer.operators(kind)
    routed = "gate" in {op.name for op in operators.get("attn F", ())}
    reads_counts = software.static_experts is None
    drains = routed and reads_counts and (plan.ep > 1 or software.modules != "torch")
    policy = measured_checkpoint(block, scenario.recompute, software)
    exchange: CallKind = "exchange" if software.modules == "torch" else "collective"
    passes = []
    for forward, phases in ((True, FORWARD), (False, BACKWARD)):
        launches: list[Launch] = []
        if drains and forward:
            launches.append(Launch(times.call_s("counts", True), 0.0))
        around = Launch(around_block_s(pricer, block, times, forward), 0.0)
        inner_s = feed_forward_checkpoints(block, scenario.recompute) * times.call_s("checkpoint", forward)
        extra = times.call_s(policy, forward) if policy else 0.0
        for phase in phases:
            if phase == BLOCK_BEGINS[forward]:
                launches.append(around)
            if phase == FEED_FORWARD[forward]:
                launches.append(Launch(inner_s, 0.0))
            price = compute.get((kind, phase, "alone"), NO_COMPUTE)
            launches += _phase_launches(pricer, times, kind, phase, price, extra)
            if phase in EP_PHASES and routed and plan.ep > 1:
                moved = transfer.get((kind, phase, "alone"))
                device_s = 0.0 if moved is None else moved.launch_s + moved.payload_s
                launches.append(Launch(times.call_s(exchange, forward), device_s))
        passes.append(PassLaunches(tuple(launches), drains and forward))
    return passes[0], passes[1]


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
        seconds += outer * times.call_s("checkpoint", forward)
    if plan.zero_stage == 3 and software.parameters_copied:
        seconds += (1 + (block.routed and plan.ep > 1)) * times.call_s("fsdp", forward)
    elif plan.zero_stage == 3:
        seconds += times.call_s("collective", True)
        seconds += 0.0 if forward else times.call_s("collective", False)
    elif pricer.gradient_sync.in_backward and not forward:
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
    operators = pricer.operators(kind).get(phase, ())
    alone = [cost.seconds for cost in pricer.operator_costs(kind, phase, "alone")]
    total = fsum(alone)
    factor = (price.seconds - price.exposed_s) / total if total else 0.0
    launches = []
    traced = traces_checkpoint(pricer.shape.block(kind), software)
    for op, seconds in zip(operators, alone, strict=True):
        launches += device_reads(op, software)
        part: GraphPart = "attention" if phase.startswith("attn") else "experts"
        if op.cls in ("gate_gemm", "topk"):
            part = "router"
        unseen = part in software.cuda_graphs or (traced and op.recompute)
        calls = () if unseen else calls_of(op, software.modules)
        launches.append(Launch(host_seconds(calls, times, extra_s), seconds * factor))
    if price.exposed_s > 0.0:
        own = plan.tp > 1 and not software.dtensor
        launches.append(
            Launch(own * COLLECTIVES_PER_HALF * times.call_s("collective", True), price.exposed_s)
        )
    return launches


def device_reads(op: Operator, software: Software) -> list[Launch]:
    """Reads of the device before an operator, beside those of token counts.

    Biases of experts that are repeated by row take three: `repeat_interleave` checks its counts and reads
    their sum, and the last offset becomes a Python number (torchtitan 0.2.2
    torchtitan/models/gpt_oss/model/moe.py, `_run_experts_grouped_mm`).
    """
    repeated = software.expert_biases == "repeated" and op.name in (
        "experts.gate_up.bias",
        "experts.down.bias",
    )
    return [Launch(0.0, 0.0, reads=True)] if repeated else []
