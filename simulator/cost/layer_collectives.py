"""Exposed seconds, bytes and evidence of the collectives inside the phases of a block (pure).

A layer has those of tensor, context and split-expert parallelism and reductions of largest elements; the
embedding, the head and its loss have those of their tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from math import fsum, sqrt
from statistics import NormalDist
from typing import NamedTuple

from msgspec import Struct

from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.evidence import (
    CONTEXT,
    NO_EVIDENCE,
    SPLIT_EXPERTS,
    TENSOR,
    CostedSeconds,
    Evidence,
    Moved,
    combined,
    summed,
)
from moesim.simulator.cost.library_collectives import RingOperation, ring_price, small_all_reduce_s
from moesim.simulator.cost.overlap import (
    CUTS_GEMMS,
    EdgeGemms,
    HalfCollectives,
    HalfLayerGemms,
    HalfOverlap,
    OverlapSlowDown,
    exposed_backward,
    exposed_forward,
    exposed_overlapped,
    exposed_pipelined,
    methods_note,
    methods_of,
)
from moesim.simulator.cost.pricing import Pricer, own_latents
from moesim.simulator.cost.table import Mode, PhaseCost
from moesim.simulator.layout.parallel import gpus_in_step
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, row_bytes
from moesim.simulator.model.repeated import repeated_communication

HALVES: tuple[tuple[Phase, Phase, Phase], ...] = (
    ("attn F", "attn I", "attn W"),
    ("mlp F", "mlp I", "mlp W"),
)
OVERLAPPED = "interleaved-1f1b-overlapped"
"""Megatron core's schedule of overlapped pairs, in which weight gradients may wait."""


class CoreSeconds(NamedTuple):
    """Seconds of the GEMMs of a phase and of its core attention, alone on all SMs.

    `edges`: its first and last GEMM in pieces, where the framework cuts them beside collectives.
    """

    gemms_s: float = 0.0
    attention_s: float = 0.0
    edges: EdgeGemms = EdgeGemms()


class Inside(NamedTuple):
    """Collectives inside the phases of a block: exposed seconds and bytes by phase, and their evidence."""

    exposed: dict[Phase, float]
    moved: dict[Phase, tuple[Moved, ...]]
    """Bytes, whether compute hides them or not."""
    evidence: Evidence

    @classmethod
    def of(
        cls,
        exposed: dict[Phase, float],
        moved: Mapping[Phase, list[Moved]],
        priced: list[CostedSeconds],
        note: str = "",
    ) -> Inside:
        """Add up what the collectives of each phase move, and the evidence of their prices."""
        parts = [*(price.evidence for price in priced), Evidence.of([], [note])]
        sums = {phase: summed((part, 1.0) for part in own) for phase, own in moved.items()}
        return cls(exposed, sums, combined((part, 1.0) for part in parts))


class LayerCollectives(Struct, frozen=True):
    """Prices the collectives inside one layer on the links of a job."""

    pricer: Pricer
    kind: BlockKind

    def inside(self, seconds: Mapping[Phase, CoreSeconds], *, evidence: bool = True) -> Inside:
        """The collectives of a layer, with exposed seconds by eqs. X6, O2 and O3 of docs/model.md.

        Tensor parallelism runs an all-gather and a reduce-scatter (or one all-reduce) of the activations
        around attention and around the FFN, in the forward and for the input gradient. Context parallelism
        gathers keys and values of the whole sequence before attention and scatters their gradients after it.
        Recompute repeats those of the forward that lie inside what it runs again. Experts with their own
        tensor parallelism gather received rows before the experts and scatter the results after them; the
        backward does the reverse (eq. X14). Without `evidence` there are no bytes either.
        """
        scenario, shape, block = self.pricer.scenario, self.pricer.shape, self.pricer.shape.block(self.kind)
        plan, layer = scenario.parallel, block.layer
        assert layer is not None, "collectives are inside layers"
        exposed: dict[Phase, float] = {phase: 0.0 for half in HALVES for phase in half[:2]}
        moved: dict[Phase, list[Moved]] = {phase: [] for phase in exposed}
        tensor = self.tensor()
        parts: tuple[Attention | FeedForward, ...] = layer.attention, layer.feed_forward
        for half, part in zip(HALVES, parts, strict=True):
            first, second, _ = half
            # Routed experts take each rank's own tokens; a shared expert is split like an FFN.
            routed = block.routed and first == "mlp F" and not (shape.moe and shape.moe.shared_experts)
            if plan.tp > 1 and not routed and not part.empty:
                core = tuple(seconds.get(phase, CoreSeconds()) for phase in half)
                exposed[first], exposed[second], forward, backward = self._half_layer(part, core, *tensor)
                moved[first] += [price.moved(TENSOR) for price in forward]
                moved[second] += [price.moved(TENSOR) for price in backward]
        joined = self._joined() if block.is_mtp else {}
        for phase, own in joined.items():
            exposed[phase] += sum_s(own)
            moved[phase] += [price.moved(TENSOR) for price in own]
        again = repeated_communication(block, scenario.recompute)
        if again.feed_forward:
            exposed["mlp I"] += exposed["mlp F"]
            moved["mlp I"] += moved["mlp F"]
        context = self._context(layer.attention)
        behind = [
            self._behind_attention(context.seconds, seconds.get(phase, CoreSeconds()).attention_s)
            for phase in ("attn F", "attn I")
        ]
        exposed["attn F"] += behind[0]
        exposed["attn I"] += behind[1]
        exposed["attn I"] += again.context * behind[0]
        moved["attn F"].append(context.moved(CONTEXT))
        moved["attn I"] += [context.moved(CONTEXT)] * (1 + again.context)
        priced = [*tensor, context, *chain(*joined.values())]
        if block.routed:
            priced.append(rows := self._rows())
            if plan.expert_tp > 1:
                times = 1 + (again.experts and not again.layer)
                exposed["mlp F"] += 2.0 * rows.seconds
                exposed["mlp I"] += 2.0 * rows.seconds * times
                moved["mlp F"] += [rows.moved(SPLIT_EXPERTS)] * 2
                moved["mlp I"] += [rows.moved(SPLIT_EXPERTS)] * 2 * times
        if again.layer:
            exposed["mlp I"] += exposed["attn F"] + exposed["mlp F"]
            moved["mlp I"] += moved["attn F"] + moved["mlp F"]
        if not evidence:
            return Inside(exposed, {}, NO_EVIDENCE)
        note = methods_note(scenario.software.overlap_tensor_parallel, *self._methods_key())
        return Inside.of(exposed, moved, priced, note if plan.tp > 1 else "")

    def _methods_key(self) -> tuple[str, str, int]:
        """Format of GEMMs, architecture of the GPUs and width of the model."""
        pricer = self.pricer
        return pricer.scenario.recipe.linear, pricer.cluster.accelerator.architecture, pricer.shape.hidden

    def tensor(self) -> tuple[CostedSeconds, CostedSeconds]:
        """All-gather and reduce-scatter of a micro-batch's activations, or two halves of an all-reduce."""
        gathered, scattered = self._tensor_bytes(self.pricer.shape.hidden)
        if self.pricer.scenario.parallel.sequence_parallel:
            return self._ring("all_gather", gathered), self._ring("reduce_scatter", scattered)
        half = self._ring("all_reduce", scattered) * 0.5
        return half, half

    def tensor_s(self) -> float:
        """Seconds of all tensor-parallel collectives of a layer, forward and backward, hidden or not."""
        if self.pricer.scenario.parallel.tp == 1:
            return 0.0
        gather, scatter = (priced.seconds for priced in self.tensor())
        # With sequence parallelism the input is gathered again for the weight gradients.
        again = gather if self.pricer.scenario.parallel.sequence_parallel else 0.0
        return 2.0 * (2.0 * (gather + scatter) + again)

    def _ring(self, operation: RingOperation, size: float, ranks: int | None = None) -> CostedSeconds:
        """A collective of neighbouring ranks, by default of a tensor-parallel group."""
        ranks = self.pricer.scenario.parallel.tp if ranks is None else ranks
        links = self.pricer.links
        return ring_price(operation, size, ranks, min(ranks, links.gpus_per_node), links, self.pricer.profile)

    @property
    def _slow_down(self) -> OverlapSlowDown:
        """Slow-down of compute; that of these collectives beside GEMMs was not measured."""
        return OverlapSlowDown(self.pricer.profile.lost_beside_nccl.value)

    def _half_layer(
        self,
        part: Attention | FeedForward,
        core: tuple[CoreSeconds, ...],
        gather: CostedSeconds,
        scatter: CostedSeconds,
    ) -> tuple[float, float, list[CostedSeconds], list[CostedSeconds]]:
        """The tensor-parallel collectives of half a layer: exposed (forward, backward), and what runs.

        `core`: its forward, input gradient and weight gradient. `gather` and `scatter` are those of `tensor`.
        The stored input is gathered once more where the framework hides that behind the input gradient.
        """
        scenario, slow = self.pricer.scenario, self._slow_down
        plan, recipe, overlap = scenario.parallel, scenario.recipe, scenario.software.overlap_tensor_parallel
        inputs, gradients, columns = [gather], [scatter], list[CostedSeconds]()
        moved = HalfCollectives(gather.seconds, gather.seconds, 0.0, scatter.seconds)
        gathered_again = plan.sequence_parallel and overlap != "none"
        if plan.sequence_parallel:
            # The weight gradient may need its own quantisation of the gradient, with scales of blocks.
            columns = [gather] * (recipe.tensor_gather == "fp8" and recipe.scaling != "tensor")
            moved = self._with_pieces(moved._replace(stored_s=gather.seconds, columns_s=sum_s(columns)))
            latents = [self._tensor_bytes(width) for width in own_latents(scenario, part)]
            if latents:  # gathered in the place of the layer's input, their gradients scattered (eq. X31)
                inputs = [self._ring("all_gather", size) for size, _ in latents]
                gradients = [self._ring("reduce_scatter", size) for _, size in latents]
                gather_s = sum_s(inputs)
                moved = moved._replace(gather_s=gather_s, stored_s=gather_s, back_scatter_s=sum_s(gradients))
        if overlap in CUTS_GEMMS:
            methods = methods_of(overlap, *self._methods_key())
            of_half = methods.attention if isinstance(part, Attention) else methods.feed_forward
            half = HalfOverlap(
                of_half,
                methods.copies,
                moved,
                plan.tp,
                self.pricer.cluster.accelerator.n_sms,
                slow.compute_lost,
                methods.barrier_s,
            )
            exposed = half.forward_s(core[0].edges), half.backward_s(core[1].edges, core[2].edges)
            gathered_again = plan.sequence_parallel and of_half.stored_input is not None
        else:
            gemms = HalfLayerGemms(*(seconds.gemms_s for seconds in core))
            if scenario.schedule == OVERLAPPED and scenario.communication.delay_weight_gradients:
                gemms = gemms._replace(weight_s=0.0)  # they come after the layer has waited for its scatter
            exposed = (
                exposed_forward(moved, gemms, plan.tp, overlap, slow),
                exposed_backward(
                    moved, gemms, plan.tp, overlap, slow, sequence_parallel=plan.sequence_parallel
                ),
            )
        backward = [gather, *columns, *(inputs if gathered_again else []), *gradients]
        return *exposed, [*inputs, scatter], backward

    def _joined(self) -> dict[Phase, list[CostedSeconds]]:
        """Collectives around an MTP module's embedding and projection, which nothing hides (eq. X35).

        The gather of the stored input for the weight gradient hides behind the input gradient. Source:
        NVIDIA/Megatron-LM@377af02ad megatron/core/transformer/multi_token_prediction.py:899 to 928.
        """
        scenario = self.pricer.scenario
        if scenario.parallel.tp == 1 or not scenario.software.end_collectives:
            return {}
        joined, gradient = self._tensor_bytes(2 * self.pricer.shape.hidden)
        rows = gradient / 2.0
        gather, both = self._ring("all_gather", rows), self._ring("all_reduce", rows)
        if not scenario.parallel.sequence_parallel:
            return {"attn F": [both, gather], "attn I": [self._ring("all_reduce", gradient)]}
        scatter = self._ring("reduce_scatter", rows)
        return {
            "attn F": [scatter, self._ring("all_gather", joined), gather],
            "attn I": [gather, self._ring("reduce_scatter", gradient), gather],
        }

    def _with_pieces(self, moved: HalfCollectives) -> HalfCollectives:
        """Add what pieces cost of the gather and scatter of a micro-batch's activations (eq. X6)."""
        pricer, links, tp = self.pricer, self.pricer.links, self.pricer.scenario.parallel.tp
        points = pricer.profile.curve(f"{links.curves}collective.scale_up_fraction").curve.points
        to_the_next = max(y for _, y in points) * links.wiring.ring(tp) * links.scale_up_bytes_per_s
        gathered, scattered = self._tensor_bytes(pricer.shape.hidden)
        gather_piece_s, scatter_piece_s = (
            size / tp / to_the_next + links.scale_up_latency_s for size in (gathered, scattered)
        )
        own, received = gathered / tp, scattered / tp
        sums = Operator(
            "scatter.sum", "elementwise", "F", "bf16", bytes_read=scattered, bytes_written=received
        )
        copies = Operator("gather.copy", "copy", "F", "bf16", bytes_read=own, bytes_written=own)
        reduce_s, copy_s = (
            operator_seconds(op, pricer.cluster.accelerator, pricer.profile, SmContext()).seconds
            for op in (sums, copies)
        )
        return moved._replace(
            gather_piece_s=gather_piece_s, scatter_piece_s=scatter_piece_s, reduce_s=reduce_s, copy_s=copy_s
        )

    def _tensor_bytes(self, columns: int) -> tuple[float, float]:
        """Bytes of a micro-batch's activations as they are gathered and as they are scattered."""
        recipe = self.pricer.scenario.recipe
        elements = self.pricer.tokens / self.pricer.scenario.parallel.cp * columns
        one_scale = recipe.tensor_gather != "fp8" or recipe.scaling == "tensor"
        each = BYTES_PER_ELEMENT[recipe.tensor_gather] if one_scale else row_bytes(1.0, recipe.tensor_gather)
        return elements * each, elements * BYTES_PER_ELEMENT["bf16"]

    def _rows(self) -> CostedSeconds:
        """One all-gather or reduce-scatter, as the mean of both, of the rows of a split expert's ranks."""
        shape, plan = self.pricer.shape, self.pricer.scenario.parallel
        assert shape.moe is not None
        rows = self.pricer.tokens / (plan.cp * plan.tp) * shape.moe.routed_rows * plan.expert_tp
        size = rows * shape.routed_width * 2.0
        gather, scatter = (self._ring(name, size, plan.expert_tp) for name in _HALVES_OF_ALL_REDUCE)
        return (gather + scatter) * 0.5

    def _context(self, attention: Attention) -> CostedSeconds:
        """A ring over the context-parallel group with the keys and values of one micro-batch.

        Recurrent mixers gather the states of all ranks instead (eq. X21).
        """
        pricer, plan = self.pricer, self.pricer.scenario.parallel
        node, sequence = pricer.links.gpus_per_node, pricer.scenario.batch.sequence_length
        per_node = max(1, min(plan.cp, node // min(plan.tp, node)))
        width = attention.context_elements(sequence) / plan.tp
        states = plan.cp * attention.context_state_bytes / plan.tp
        size = pricer.tokens * width * 2.0 + pricer.tokens / sequence * states
        return ring_price("all_gather", size, plan.cp, per_node, pricer.links, pricer.profile)

    def _behind_attention(self, context_s: float, attention_s: float) -> float:
        """Exposed part of `context_s`; ring attention sends keys and values while it computes (eq. O2)."""
        scenario = self.pricer.scenario
        if context_s and scenario.software.overlap_context_parallel:
            return exposed_pipelined(context_s, attention_s, scenario.parallel.cp, self._slow_down)
        return context_s


_HALVES_OF_ALL_REDUCE: tuple[RingOperation, RingOperation] = ("all_gather", "reduce_scatter")


def sum_s(priced: list[CostedSeconds]) -> float:
    """Seconds of collectives, one after the other."""
    return fsum(price.seconds for price in priced)


# -- largest elements --------------------------------------------------------------------------------

PASSES: tuple[tuple[Phase, tuple[Phase, ...]], ...] = (
    ("mlp F", ("attn F", "mlp F")),
    ("attn I", ("mlp I", "mlp W", "attn I", "attn W")),
)
"""Phases of a forward and a backward pass, and the last one of each that hands its output on."""


def amax_exposed_s(
    pricer: Pricer, kind: BlockKind, compute: Mapping[tuple[Phase, Mode], PhaseCost]
) -> dict[Phase, float]:
    """Seconds of a layer's share in the reductions of largest elements, by phase (docs/model.md, eq. O14).

    `compute`: the layer's compute, alone on its SMs. Delayed scaling reduces the largest elements of all FP8
    tensors once for every chunk, micro-batch and direction.
    """
    scenario, layout = pricer.scenario, pricer.layout
    reduced, recipe = scenario.software.amax_reduction, scenario.recipe
    delayed = (
        recipe.linear == "fp8" and recipe.scaling == "tensor" and scenario.software.fp8_scales == "delayed"
    )
    if reduced == "none" or not delayed or pricer.shape.block(kind).layer is None:
        return {}
    plan = scenario.parallel
    together = gpus_in_step(layout, pricer.gradient_sync)
    ranks = plan.tp if reduced == "tensor-parallel" else plan.tp * plan.cp * layout.dp
    latency_s = small_all_reduce_s(ranks, min(ranks, pricer.links.gpus_per_node))
    layers = max(1.0, pricer.shape.n_layers / (plan.pp * plan.vpp))
    late = max(0.0, expected_maximum(ranks) - expected_maximum(min(ranks, together)))
    late *= scenario.variation.jitter_cv.value
    by_phase: dict[Phase, float] = {}
    for last, phases in PASSES:
        own = [compute[phase, "alone"] for phase in phases if (phase, "alone") in compute]
        squares = fsum((cost.seconds) ** 2 for cost in own)
        by_phase[last] = (latency_s + late * sqrt(layers * squares)) / layers
    return by_phase


# -- embedding, head and loss ------------------------------------------------------------------------

LOSS_REDUCTIONS = 3
"""All-reduces of one FP32 number a token: maximum, logit of the label, sum (NVIDIA/Megatron-LM@core_v0.10.0
`megatron/core/tensor_parallel/cross_entropy.py`)."""


def end_collectives(pricer: Pricer, kind: BlockKind, gemms: Mapping[Phase, CoreSeconds]) -> Inside:
    """The tensor-parallel collectives of an embedding or head (eq. X30).

    `gemms`: seconds of the head's GEMMs by phase. The embedding's rows are scattered (or all-reduced) forward
    and their gradients gathered; the head gathers its input in both passes and scatters the gradient.
    """
    plan, links = pricer.scenario.parallel, pricer.links
    tokens, split = pricer.tokens / plan.cp, plan.sequence_parallel

    def price(operation: RingOperation, size: float) -> CostedSeconds:
        return ring_price(operation, size, plan.tp, min(plan.tp, links.gpus_per_node), links, pricer.profile)

    rows = tokens * pricer.shape.hidden * 2.0
    gather, scatter, both = (price(name, rows) for name in (*_HALVES_OF_ALL_REDUCE, "all_reduce"))
    used = [gather, scatter] if split else [both]
    if pricer.shape.block(kind).is_embedding:
        runs: dict[Phase, list[CostedSeconds]] = {"mlp F": used[-1:], "mlp W": used[:-1]}
        exposed: dict[Phase, float] = {phase: sum_s(own) for phase, own in runs.items()}
    else:
        loss = [price("all_reduce", tokens * 4.0)] * LOSS_REDUCTIONS
        runs = {"mlp F": [*used[:-1], *loss], "mlp I": used}
        hides = pricer.scenario.software.overlap_tensor_parallel != "none"
        slow_down = OverlapSlowDown(pricer.profile.lost_beside_nccl.value)

        def beside(collective: CostedSeconds, phase: Phase) -> float:
            seconds = gemms[phase].gemms_s if hides and phase in gemms else 0.0
            return exposed_overlapped(collective.seconds, seconds, slow_down)

        exposed = {
            "mlp F": split * gather.seconds + LOSS_REDUCTIONS * loss[0].seconds,
            "mlp I": beside(gather, "mlp I") + beside(scatter, "mlp W") if split else beside(both, "mlp W"),
        }
        used = [*used, loss[0]]
    moved = {phase: [price.moved(TENSOR) for price in own] for phase, own in runs.items()}
    return Inside.of(exposed, moved, used)


@lru_cache(maxsize=1024)
def expected_maximum(n: int) -> float:
    """Expected largest of n standard normal draws (Blom 1958: the quantile at (n - 3/8) / (n + 1/4))."""
    # Rounding to twelve digits gives the same value with every mathematics library.
    return 0.0 if n < 2 else round(NormalDist().inv_cdf((n - 0.375) / (n + 0.25)), 12)
