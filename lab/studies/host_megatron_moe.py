"""Host time of Megatron core's attention, shared expert, dispatchers, tensor parallelism and pipeline schedules.

    torchrun --nproc-per-node 2 -m lab.studies.host_megatron_moe --part layers --out DIR --budget 60
    torchrun --nproc-per-node 2 -m lab.studies.host_megatron_moe --part tensor --out DIR --budget 60
    torchrun --nproc-per-node 2 -m lab.studies.host_megatron_moe --part pipeline --out DIR --budget 40

`layers`: GQA and MLA, dense and routed, all-to-all and flex dispatcher, with experts over both ranks. DeepEP's
calls are an identity that reads the counts of rows, as DeepEP does. `tensor`: tensor and sequence parallelism
of two with Megatron core's own linear layers. `pipeline`: its schedules over two stages of one product. Plain
modules as in host_megatron.py, whose differences between depths give a layer's time. Tensors are tiny, so that
the device never limits. A case that fails loses its own row. `--dry` runs every path on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from msgspec.structs import replace
from functools import partial
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare(CUDA_DEVICE_MAX_CONNECTIONS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from lab.studies import host_megatron_models as models
from lab.studies.host_blocks_study import Study, conduct, host_reads, passes, wall
from lab.studies.host_megatron import MEASURED, describe, short
from lab.studies.host_megatron_models import (
    EXPERT_FFN,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    TOKENS,
    PlainAttention,
    PlainExperts,
    PlainLinear,
    PlainNorm,
)
from lab.studies.host_megatron_step import Tiny, loss_of

SHALLOW, DEEP = 2, 8


@dataclass(frozen=True)
class LayerCase:
    """A model of layers that are all alike."""

    layers: int = 2
    latent: bool = False
    experts: int = 0
    shared: bool = False
    flex: bool = False
    tensor: int = 1
    recompute: bool = False

    @property
    def name(self) -> str:
        """Name of the case without its depth."""
        parts = ["mla" if self.latent else "gqa"]
        parts += [f"{self.experts} experts, {'flex' if self.flex else 'alltoall'}"] if self.experts else []
        parts += ["shared expert"] * self.shared + [f"tp{self.tensor}"] * (self.tensor > 1)
        return ", ".join(parts + ["full recompute"] * self.recompute)


def attention_spec(case: LayerCase, column: type, row: type) -> ModuleSpec:
    """Megatron core's latent attention with plain down-projections, which every rank holds whole."""
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            q_layernorm=PlainNorm,
            kv_layernorm=PlainNorm,
            linear_q_down_proj=PlainLinear,
            linear_q_up_proj=column,
            linear_kv_down_proj=PlainLinear,
            linear_kv_up_proj=column,
            core_attention=PlainAttention,
            linear_proj=row,
        ),
    )


def layer_spec(case: LayerCase) -> ModuleSpec:
    """Megatron core's transformer layer of a case."""
    column: type = ColumnParallelLinear if case.tensor > 1 else PlainLinear
    row: type = RowParallelLinear if case.tensor > 1 else PlainLinear
    linear = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    mlp: Any = ModuleSpec(module=MLP, submodules=linear)
    if case.experts:
        parts: dict[str, Any] = {"experts": ModuleSpec(module=PlainExperts)}
        if case.shared:
            parts["shared_experts"] = ModuleSpec(module=SharedExpertMLP, submodules=linear)
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(**parts))
    spec = models.transformer_layer(column, row, IdentityOp, mlp)
    if case.latent:
        spec.submodules.self_attention = attention_spec(case, column, row)
    return spec


def configuration(case: LayerCase, device: str) -> TransformerConfig:
    """The configuration of a case."""
    more: dict[str, Any] = {}
    if case.experts:
        more = {
            "num_moe_experts": case.experts,
            "moe_router_topk": 4,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "flex" if case.flex else "alltoall",
            "moe_router_dtype": "fp32",
            "moe_ffn_hidden_size": EXPERT_FFN,
            "expert_model_parallel_size": torch.distributed.get_world_size(),
            "expert_tensor_parallel_size": 1,
        }
        if case.shared:
            more["moe_shared_expert_intermediate_size"] = EXPERT_FFN
    if case.recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if case.latent:
        more |= {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 64, "qk_pos_emb_head_dim": 32}
        more |= {"v_head_dim": 64, "kind": MLATransformerConfig, "rope_type": "yarn"}
    else:
        more |= {"num_query_groups": GROUPS, "kv_channels": models.CHANNELS}
    return models.base_configuration(
        device,
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=case.tensor,
        sequence_parallel=case.tensor > 1,
        bias_dropout_fusion=True,
        **more,
    )


def imitate_deepep() -> None:
    """DeepEP's two calls as identities: rows stay on their rank, and the host reads the counts."""

    def dispatch(
        x: Any, chosen: Any, probs: Any, experts: int, group: Any, **_: Any
    ) -> tuple[Any, Any, Any, Any, Any]:
        local = experts // group.size()
        own = chosen.masked_fill(chosen >= local, -1)
        counts = torch.bincount(own.flatten() + 1, minlength=local + 1)[1:].cpu()
        return x.clone(), own, probs.clone(), counts, None

    dispatcher: Any = token_dispatcher
    dispatcher.fused_dispatch = dispatch
    dispatcher.fused_combine = lambda x, group, handle, **_: (x.clone(), None)
    dispatcher.set_deepep_num_sms = lambda _: None


def accept_plain_layers() -> None:
    """Let latent attention take plain down-projections in the place of Transformer Engine's."""
    module: Any = multi_latent_attention
    module.TELinear = PlainLinear


def whole(study: Study, case: LayerCase, reads: bool) -> dict[str, Any]:
    """Times of a whole model."""
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    positions = "none" if case.latent else "rope"
    model = models.training_model(
        configuration(case, study.device), layer_spec(case), TOKENS, positions, study.device
    )
    inputs = models.inputs(study.device)

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    out = passes(study, lambda: model(**inputs).mean(), clear)
    if reads:
        out["host_reads"] = host_reads(study, lambda: model(**inputs).mean())
    return out | {"parameters": len(list(model.parameters()))}


def layer(study: Study, case: LayerCase) -> dict[str, Any]:
    """Host time and reads of the device of one layer: slopes between two depths."""
    low_depth, high_depth = (1, 2) if study.dry else (SHALLOW, DEEP)
    low = whole(study, replace(case, layers=low_depth), True)
    high = whole(study, replace(case, layers=high_depth), True)
    span = high_depth - low_depth
    out: dict[str, Any] = {"depths": (low_depth, high_depth)}
    for name in MEASURED:
        for cut in ("us", "p25_us", "p75_us"):
            out[f"{name}_{cut}"] = (high[name][cut] - low[name][cut]) / span
    for name in ("forward", "both"):
        if high["host_reads"]:
            out[f"reads {name}"] = (high["host_reads"][name] - low["host_reads"][name]) / span
    out["parameters"] = (high["parameters"] - low["parameters"]) / span
    return out


def schedules(study: Study, chunks: int, sync: bool) -> dict[str, Any]:
    """Host time that one micro-batch of one product takes on a rank under a pipeline schedule.

    `chunks` model parts on each rank; `sync`: whether the host waits for the device behind every exchange.
    """
    few, many = 8, 24
    virtual: dict[str, Any] = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    config = models.base_configuration(
        study.device, num_layers=2 * chunks, hidden_size=HIDDEN, num_attention_heads=HEADS,
        pipeline_model_parallel_size=2, **virtual,
    )  # fmt: skip
    config.batch_p2p_sync = sync
    config.batch_p2p_comm, config.overlap_p2p_comm = chunks == 1, chunks > 1
    parts = [Stage(config, study.device) for _ in range(chunks)]
    x = torch.randn(TOKENS, 1, HIDDEN, dtype=models.BF, device=study.device)
    run = get_forward_backward_func(pp_size=2, vp_size=chunks if chunks > 1 else None)

    def forever() -> Any:
        while True:
            yield x

    def step(data: Any, model: Any) -> Any:
        return model(next(data)), loss_of

    def steps(count: int) -> None:
        run(
            forward_step_func=step,
            data_iterator=[forever() for _ in parts] if chunks > 1 else forever(),
            model=parts if chunks > 1 else parts[0],
            num_microbatches=count,
            seq_length=TOKENS,
            micro_batch_size=1,
        )

    def direct(count: int) -> None:
        for _ in range(count):
            for part in parts:
                part.given = None
                loss_of(part(x.detach().requires_grad_()))[0].backward()

    out: dict[str, Any] = {"micro-batches": (few, many), "chunks": chunks}
    for kind, call in (("schedule", steps), ("direct", direct)):
        medians = {n: wall(study, partial(call, n))["us"] for n in (few, many)}
        out[f"{kind}, micro-batch_us"] = (medians[many] - medians[few]) / (many - few)
        out[f"{kind}, once_us"] = medians[few] - few * out[f"{kind}, micro-batch_us"]
    out["per action_us"] = (out["schedule, micro-batch_us"] - out["direct, micro-batch_us"]) / (2 * chunks)
    return out


class Stage(Tiny):
    """One product as a pipeline stage."""

    given: Any = None

    def set_input_tensor(self, tensor: Any) -> None:
        """Take what comes from the stage before."""
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of what the stage before sent, or of the data."""
        return (x if self.given is None else self.given) @ self.weight


def run_part(study: Study, part: str) -> None:
    """All cases of a part, the most wanted first; every rank runs the same."""
    cases: tuple[LayerCase, ...] = ()
    if part == "layers":
        cases = (
            LayerCase(),
            LayerCase(latent=True),
            LayerCase(experts=32),
            LayerCase(experts=32, shared=True),
            LayerCase(experts=32, flex=True),
            LayerCase(latent=True, experts=32, shared=True),
            LayerCase(experts=128),
            LayerCase(recompute=True),
            LayerCase(latent=True, recompute=True),
            LayerCase(experts=32, recompute=True),
        )
    elif part == "tensor":
        cases = (
            LayerCase(tensor=2),
            LayerCase(latent=True, tensor=2),
            LayerCase(experts=32, shared=True, tensor=2),
            LayerCase(experts=32, tensor=2),
            LayerCase(experts=32, flex=True, tensor=2),
            LayerCase(latent=True, experts=32, shared=True, tensor=2),
        )
    if cases:
        study.run("parts", "warm-up", partial(layer, study, replace(cases[0], latent=True)), 4.0)
        study.run("parts", "warm-up of experts", partial(layer, study, replace(cases[0], experts=32)), 4.0)
    for case in cases:
        study.run("blocks", case.name, partial(layer, study, case), 4.0)
    if part == "pipeline":
        named: dict[str, Callable[[], Any]] = {
            "1f1b": partial(schedules, study, 1, True),
            "1f1b, no wait": partial(schedules, study, 1, False),
            "interleaved": partial(schedules, study, 2, False),
        }
        for name, call in named.items():
            study.run("parts", name, call, 4.0)


def main() -> None:
    """Measure and write the results."""
    warnings.simplefilter("ignore")
    parser = study_setup.parser(60.0)
    parser.add_argument("--part", choices=("layers", "tensor", "pipeline"), default="layers")
    options = parser.parse_args()
    if options.dry:
        from lab.studies.host_megatron_dry import imitate_gpu_on_cpu

        imitate_gpu_on_cpu()
    degrees = {"tensor": (2, 1), "pipeline": (1, 2)}.get(options.part, (1, 1))
    rank, world = models.start("cpu" if options.dry else "cuda", *degrees)
    imitate_deepep()
    accept_plain_layers()
    study = Study(options, f"host_megatron_moe_{options.part}.json", rank)
    describe(study, world)
    conduct(study, partial(run_part, part=options.part), short)


if __name__ == "__main__":
    main()
