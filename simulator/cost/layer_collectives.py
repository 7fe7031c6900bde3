"""Exposed seconds of the tensor- and context-parallel collectives inside each phase of a layer (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from moesim.hwmodels.accelerator import Accelerator
from moesim.hwmodels.calibration import CalibrationProfile
from moesim.simulator.cost.compute import SmContext, operator_seconds
from moesim.simulator.cost.library_collectives import ring_price
from moesim.simulator.cost.moved import CONTEXT, SPLIT_EXPERTS, TENSOR, Moved, summed
from moesim.simulator.cost.overlap import (
    CUTS_GEMMS,
    EdgeGemms,
    HalfCollectives,
    HalfLayerGemms,
    HalfOverlap,
    OverlapSlowDown,
    exposed_backward,
    exposed_forward,
    exposed_pipelined,
    methods_note,
    methods_of,
)
from moesim.simulator.cost.price_evidence import PricedSeconds, PriceEvidence, combined
from moesim.simulator.dispatchers.protocol import Links
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.feed_forward.protocol import FeedForward
from moesim.simulator.model.operator import BlockKind, Operator, Phase
from moesim.simulator.model.precision import BYTES_PER_ELEMENT, row_bytes
from moesim.simulator.model.repeated import repeated_communication
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.scenario import Scenario

HALVES: tuple[tuple[Phase, Phase, Phase], ...] = (
    ("attn F", "attn I", "attn W"),
    ("mlp F", "mlp I", "mlp W"),
)


class CoreSeconds(NamedTuple):
    """Seconds of the GEMMs of a phase and of its core attention, alone on all SMs.

    `edges`: its first and last GEMM in pieces, where the framework cuts them beside collectives.
    """

    gemms_s: float = 0.0
    attention_s: float = 0.0
    edges: EdgeGemms = EdgeGemms()


_NO_CORE = CoreSeconds()


LayerPart = Attention | FeedForward

OVERLAPPED = "interleaved-1f1b-overlapped"
"""Megatron core's schedule of overlapped pairs, in which weight gradients may wait."""


def own_latents(scenario: Scenario, part: LayerPart) -> tuple[int, ...]:
    """Columns of the latents that sequence-parallel ranks form from their own tokens and gather; else empty.

    Megatron core runs the down-projections of MLA on every rank's own tokens (`parallel_mode` "duplicated",
    NVIDIA/Megatron-LM 26.04 `multi_latent_attention.py`).
    """
    split = scenario.software.modules == "transformer-engine" and scenario.parallel.sequence_parallel
    if not split or scenario.parallel.tp == 1 or not isinstance(part, Attention):
        return ()
    return part.gathered_latents


@dataclass(frozen=True, slots=True)
class LayerCollectives:
    """Prices the collectives inside one layer on the links of a scenario."""

    scenario: Scenario
    links: Links
    profile: CalibrationProfile
    accelerator: Accelerator

    def exposed(
        self, shape: ModelShape, kind: BlockKind, tokens: int, seconds: Mapping[Phase, CoreSeconds]
    ) -> dict[Phase, float]:
        """Exposed seconds by phase (docs/model.md, eq. X6, O2, O3).

        Tensor parallelism runs an all-gather and a reduce-scatter (or one all-reduce) of the activations
        around attention and around the FFN, in the forward and for the input gradient. Context parallelism
        gathers keys and values of the whole sequence before attention and scatters their gradients after it.
        Recompute repeats those of the forward that lie inside what it runs again. Experts with their own
        tensor parallelism gather received rows before the experts and scatter the results after them; the
        backward does the reverse (eq. X14).
        """
        out = {phase: 0.0 for half in HALVES for phase in half[:2]}
        plan, block = self.scenario.parallel, shape.block(kind)
        assert block.layer is not None, "collectives are inside layers"
        experts = block.routed
        forward = dict.fromkeys(("attn F", "mlp F"), 0.0)
        for first, second, third in HALVES:
            core = tuple(seconds.get(ph, _NO_CORE) for ph in (first, second, third))
            # Routed experts take each rank's own tokens; a shared expert is split like an FFN.
            routed = experts and first == "mlp F" and not (shape.moe and shape.moe.shared_experts)
            half = block.layer.attention if first == "attn F" else block.layer.feed_forward
            if plan.tp > 1 and not routed and not half.empty:
                forward[first], out[second] = self._half_layer(shape, tokens, core, half)
        again = repeated_communication(block, self.scenario.recompute)
        if again.feed_forward:
            out["mlp I"] += forward["mlp F"]
        context = self._context(block.layer.attention, tokens).seconds
        if context:
            attention = [seconds.get(phase, _NO_CORE).attention_s for phase in ("attn F", "attn I")]
            exposed = self._overlapped_with_attention(context, attention[0])
            forward["attn F"] += exposed
            out["attn I"] += self._overlapped_with_attention(context, attention[1])
            out["attn I"] += again.context * exposed
        if experts and plan.expert_tp > 1:
            rows = 2.0 * self._rows(shape, tokens).seconds
            forward["mlp F"] += rows
            out["mlp I"] += rows * (1 + (again.experts and not again.layer))
        out["attn F"], out["mlp F"] = forward["attn F"], forward["mlp F"]
        if again.layer:
            out["mlp I"] += forward["attn F"] + forward["mlp F"]
        return out

    def evidence(self, shape: ModelShape, kind: BlockKind, tokens: int) -> PriceEvidence:
        """Curves behind the exposed seconds of a block."""
        block = shape.block(kind)
        assert block.layer is not None, "collectives are inside layers"
        priced = [*self._tensor(shape, tokens), self._context(block.layer.attention, tokens)]
        if block.routed:
            priced.append(self._rows(shape, tokens))
        s = self.scenario
        note = methods_note(s.software.overlap_tensor_parallel, s.recipe.linear) if s.parallel.tp > 1 else ""
        assumed = PriceEvidence.of([], [note])
        return combined((evidence, 1.0) for evidence in (*(price.evidence for price in priced), assumed))

    def moved(self, shape: ModelShape, kind: BlockKind, tokens: int) -> dict[Phase, tuple[Moved, ...]]:
        """Bytes by phase of the collectives that `exposed` prices, whether compute hides them or not."""
        plan, block = self.scenario.parallel, shape.block(kind)
        assert block.layer is not None, "collectives are inside layers"
        again = repeated_communication(block, self.scenario.recompute)
        forward: dict[Phase, list[Moved]] = {"attn F": [], "mlp F": []}
        backward: dict[Phase, list[Moved]] = {"attn I": [], "mlp I": []}
        for first, second, _ in HALVES:
            routed = block.routed and first == "mlp F" and not (shape.moe and shape.moe.shared_experts)
            half = block.layer.attention if first == "attn F" else block.layer.feed_forward
            if plan.tp > 1 and not routed and not half.empty:
                ran = self._half_layer_runs(shape, tokens, half)
                forward[first] += [part.moved(TENSOR) for part in ran[0]]
                backward[second] += [part.moved(TENSOR) for part in ran[1]]
        backward["mlp I"] += again.feed_forward * forward["mlp F"]
        context = self._context(block.layer.attention, tokens).moved(CONTEXT)
        forward["attn F"].append(context)
        backward["attn I"] += [context] * (1 + again.context)
        if block.routed and plan.expert_tp > 1:
            rows = [self._rows(shape, tokens).moved(SPLIT_EXPERTS)] * 2
            forward["mlp F"] += rows
            backward["mlp I"] += rows * (1 + (again.experts and not again.layer))
        backward["mlp I"] += again.layer * (forward["attn F"] + forward["mlp F"])
        return {phase: summed((part, 1.0) for part in parts) for phase, parts in (forward | backward).items()}

    def _half_layer_runs(
        self, shape: ModelShape, tokens: int, part: LayerPart
    ) -> tuple[list[PricedSeconds], list[PricedSeconds]]:
        """The tensor-parallel collectives of half a layer, (forward, backward), as `_half_layer` prices them.

        The stored input is gathered once more where the framework hides that behind the input gradient.
        """
        gather, scatter = self._tensor(shape, tokens)
        if not self.scenario.parallel.sequence_parallel:
            return [gather, scatter], [gather, scatter]  # halves of all-reduces
        overlap, recipe = self.scenario.software.overlap_tensor_parallel, self.scenario.recipe
        latents = own_latents(self.scenario, part)
        inputs, gradients = self._latents(latents, tokens) if latents else ([gather], [scatter])
        again = overlap != "none"
        if overlap in CUTS_GEMMS:
            methods = methods_of(overlap, recipe.linear)
            half = methods.attention if isinstance(part, Attention) else methods.feed_forward
            again = half.stored_input is not None
        columns = [gather] if self._gradient_gathered_twice else []
        return [*inputs, scatter], [gather, *columns, *(inputs if again else []), *gradients]

    def tensor_s(self, shape: ModelShape, tokens: int) -> float:
        """Seconds of all tensor-parallel collectives of a layer, forward and backward, hidden or not."""
        if self.scenario.parallel.tp == 1:
            return 0.0
        gather, scatter = (priced.seconds for priced in self._tensor(shape, tokens))
        again = gather if self.scenario.parallel.sequence_parallel else 0.0  # for the weight gradients
        return 2.0 * (2.0 * (gather + scatter) + again)

    @property
    def _slow_down(self) -> OverlapSlowDown:
        """Slow-down of compute; that of these collectives beside GEMMs was not measured."""
        return OverlapSlowDown(self.profile.lost_beside_nccl.value)

    def _half_layer(
        self, shape: ModelShape, tokens: int, core: tuple[CoreSeconds, ...], part: LayerPart
    ) -> tuple[float, float]:
        """(forward, backward) exposed seconds of the tensor-parallel collectives of half a layer.

        `core`: its forward, input gradient and weight gradient.
        """
        plan, recipe = self.scenario.parallel, self.scenario.recipe
        overlap = self.scenario.software.overlap_tensor_parallel
        moved = self._collectives(shape, tokens)
        latents = own_latents(self.scenario, part)
        if latents:
            moved = self._with_latents(moved, latents, tokens)
        if overlap in CUTS_GEMMS:
            methods = methods_of(overlap, recipe.linear)
            half = HalfOverlap(
                methods.attention if isinstance(part, Attention) else methods.feed_forward,
                methods.copies,
                moved,
                plan.tp,
                self.accelerator.n_sms,
                self._slow_down.compute_lost,
                methods.barrier_s,
            )
            return half.forward_s(core[0].edges), half.backward_s(core[1].edges, core[2].edges)
        gemms = HalfLayerGemms(*(seconds.gemms_s for seconds in core))
        if self._weight_gradients_apart:  # nothing is left to hide the scattered gradient behind
            gemms = gemms._replace(weight_s=0.0)
        return exposed_forward(moved, gemms, plan.tp, overlap, self._slow_down), exposed_backward(
            moved, gemms, plan.tp, overlap, self._slow_down, sequence_parallel=plan.sequence_parallel
        )

    @property
    def _weight_gradients_apart(self) -> bool:
        """Whether weight gradients are computed after the layer's backward has waited for its scatter."""
        s = self.scenario
        return s.schedule == OVERLAPPED and s.communication.delay_weight_gradients

    def _with_latents(self, moved: HalfCollectives, columns: tuple[int, ...], tokens: int) -> HalfCollectives:
        """Gathers of latents in the place of the layer's input, scatters of their gradients (eq. X31)."""
        gathers, scatters = self._latents(columns, tokens)
        gather_s, scatter_s = (fsum(part.seconds for part in parts) for parts in (gathers, scatters))
        return moved._replace(gather_s=gather_s, stored_s=gather_s, back_scatter_s=scatter_s)

    def _latents(
        self, columns: tuple[int, ...], tokens: int
    ) -> tuple[list[PricedSeconds], list[PricedSeconds]]:
        """All-gather of each latent, and reduce-scatter of its gradient."""
        args = (self.scenario.parallel.tp, min(self.scenario.parallel.tp, self.links.gpus_per_node))
        sizes = [self._tensor_bytes(width, tokens) for width in columns]
        return (
            [ring_price("all_gather", size, *args, self.links, self.profile) for size, _ in sizes],
            [ring_price("reduce_scatter", size, *args, self.links, self.profile) for _, size in sizes],
        )

    @property
    def _gradient_gathered_twice(self) -> bool:
        """Whether the weight gradient reads its own quantisation of the gradient, with scales of blocks."""
        recipe = self.scenario.recipe
        return recipe.tensor_gather == "fp8" and recipe.scaling != "tensor"

    def _collectives(self, shape: ModelShape, tokens: int) -> HalfCollectives:
        """Collectives of a micro-batch's activations around a half layer (eq. X6)."""
        plan = self.scenario.parallel
        gather, scatter = (priced.seconds for priced in self._tensor(shape, tokens))
        if not plan.sequence_parallel:
            return HalfCollectives(gather, gather, 0.0, scatter)
        gathered, scattered = self._tensor_bytes(shape.hidden, tokens)
        gather_piece, scatter_piece = (
            size / plan.tp / self._neighbour_bytes_per_s + self.links.scale_up_latency_s
            for size in (gathered, scattered)
        )
        own, received = gathered / plan.tp, scattered / plan.tp
        sums = Operator(
            "scatter.sum", "elementwise", "F", "bf16", bytes_read=scattered, bytes_written=received
        )
        copies = Operator("gather.copy", "copy", "F", "bf16", bytes_read=own, bytes_written=own)
        reduce_s, copy_s = (
            operator_seconds(op, self.accelerator, self.profile, SmContext()).seconds for op in (sums, copies)
        )
        columns = gather if self._gradient_gathered_twice else 0.0
        return HalfCollectives(
            gather, gather, gather, scatter, columns, gather_piece, scatter_piece, reduce_s, copy_s
        )

    def _tensor_bytes(self, columns: int, tokens: int) -> tuple[float, float]:
        """Bytes of a micro-batch's activations as they are gathered and as they are scattered."""
        recipe = self.scenario.recipe
        elements = tokens / self.scenario.parallel.cp * columns
        one_scale = recipe.tensor_gather != "fp8" or recipe.scaling == "tensor"
        each = BYTES_PER_ELEMENT[recipe.tensor_gather] if one_scale else row_bytes(1.0, recipe.tensor_gather)
        return elements * each, elements * BYTES_PER_ELEMENT["bf16"]

    @property
    def _neighbour_bytes_per_s(self) -> float:
        """Rate of a transfer to the next rank of a tensor-parallel group, as a ring's."""
        points = self.profile.curve(f"{self.links.curves}collective.scale_up_fraction").curve.points
        share = max(y for _, y in points) * self.links.wiring.ring(self.scenario.parallel.tp)
        return share * self.links.scale_up_bytes_per_s

    def _tensor(self, shape: ModelShape, tokens: int) -> tuple[PricedSeconds, PricedSeconds]:
        """All-gather and reduce-scatter of a micro-batch's activations, or two halves of an all-reduce."""
        plan, node = self.scenario.parallel, self.links.gpus_per_node
        gathered, scattered = self._tensor_bytes(shape.hidden, tokens)
        group = (plan.tp, min(plan.tp, node))
        if not plan.sequence_parallel:
            half = self._half(scattered, group, split=False)
            return half, half
        args = (*group, self.links, self.profile)
        return ring_price("all_gather", gathered, *args), ring_price("reduce_scatter", scattered, *args)

    def _rows(self, shape: ModelShape, tokens: int) -> PricedSeconds:
        """One all-gather or reduce-scatter, as the mean of both, of the rows of a split expert's ranks."""
        assert shape.moe is not None
        plan, node = self.scenario.parallel, self.links.gpus_per_node
        rows = tokens / (plan.cp * plan.tp) * shape.moe.routed_rows * plan.expert_tp
        group = (plan.expert_tp, min(plan.expert_tp, node))
        return self._half(rows * shape.routed_width * 2.0, group, split=True)

    def _half(self, total_bytes: float, group: tuple[int, int], *, split: bool) -> PricedSeconds:
        """Half of an all-gather and a reduce-scatter (`split`), or of an all-reduce; group as in eq. X5."""
        args = (total_bytes, *group, self.links, self.profile)
        if not split:
            both = ring_price("all_reduce", *args)
            return PricedSeconds(
                both.seconds / 2.0, both.evidence, both.nic_bytes / 2.0, both.scale_up_bytes / 2.0
            )
        gather, scatter = ring_price("all_gather", *args), ring_price("reduce_scatter", *args)
        seconds, evidence = (gather.seconds + scatter.seconds) / 2.0, gather.evidence | scatter.evidence
        return PricedSeconds(seconds, evidence, gather.nic_bytes, gather.scale_up_bytes)  # as the scatter's

    def _context(self, attention: Attention, tokens: int) -> PricedSeconds:
        """A ring over the context-parallel group with the keys and values of one micro-batch.

        Recurrent mixers gather the states of all ranks instead (eq. X21).
        """
        plan, per_node = self.scenario.parallel, self._context_ranks_per_node()
        sequence = self.scenario.batch.sequence_length
        width = attention.context_elements(sequence) / plan.tp
        states = plan.cp * attention.context_state_bytes / plan.tp
        size = tokens * width * 2.0 + tokens / sequence * states
        return ring_price("all_gather", size, plan.cp, per_node, self.links, self.profile)

    def _context_ranks_per_node(self) -> int:
        plan, node = self.scenario.parallel, self.links.gpus_per_node
        return max(1, min(plan.cp, node // min(plan.tp, node)))

    def _overlapped_with_attention(self, context_s: float, attention_s: float) -> float:
        """Exposed part of `context_s`; ring attention sends keys and values while it computes (eq. O2)."""
        if self.scenario.software.overlap_context_parallel:
            return exposed_pipelined(context_s, attention_s, self.scenario.parallel.cp, self._slow_down)
        return context_s
