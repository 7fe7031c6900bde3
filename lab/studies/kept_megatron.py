"""Memory that layers of Megatron core keep under tensor parallelism of two, by recompute, and host time.

    torchrun --nproc-per-node 2 -m lab.studies.kept_megatron --out DIR --budget 70

Layers, tensor-parallel linear layers, recompute, router and dispatcher are Megatron core's own. Norms, flash
attention and the grouped GEMMs of experts are PyTorch's in the places of Transformer Engine's. Every token
goes to every expert, so that both ranks have the same rows. The script writes kept_megatron.json after every
case. A case that fails loses its own row. `--dry` runs every path on a CPU.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from msgspec.structs import replace
from functools import partial
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare(CUDA_DEVICE_MAX_CONNECTIONS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

from lab.studies import host_megatron_models as models
from lab.studies.host_blocks_study import Study, conduct, passes
from lab.studies.host_megatron import MEASURED, describe, short
from lab.studies.kept_bytes import kept_bytes, slope

HIDDEN, HEADS, GROUPS, CHANNELS, FFN = 1024, 12, 4, 64, 3072
EXPERTS, EXPERT_FFN, SHARED_FFN = 8, 640, 1536
TOKENS, VOCABULARY, TENSOR_PARALLEL = 2048, 512, 2
DEPTHS = (2, 4)


@dataclass(frozen=True)
class TensorParallelCase:
    """A model of tensor-parallel layers; `recompute`: modules of a layer between commas, or `full`."""

    layers: int = 2
    sequence_parallel: bool = True
    routed: bool = False
    recompute: str = ""

    @property
    def name(self) -> str:
        """Name of the case without its depth."""
        kind = "routed" if self.routed else "dense"
        return f"{kind}, sequence parallel {self.sequence_parallel}, recompute {self.recompute or 'none'}"


class PlainGrouped(torch.nn.Module):  # type: ignore[misc]
    """A grouped linear layer in the place of Transformer Engine's, for groups of equal size."""

    def __init__(self, groups: int, input_size: int, output_size: int, **_: Any) -> None:
        """Make the weights."""
        super().__init__()
        weight = torch.randn(groups, output_size, input_size, dtype=torch.bfloat16) * 0.02
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, None]:
        """The GEMM of each group."""
        ends = models.group_ends(x.shape[0], len(splits), x.device.type)
        return models.grouped(x, self.weight, ends), None


def layer_spec(case: TensorParallelCase) -> ModuleSpec:
    """Megatron core's transformer layer with its own tensor-parallel linear layers."""
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp: Any = ModuleSpec(module=MLP, submodules=linear)
    if case.routed:
        from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

        grouped = MLPSubmodules(linear_fc1=PlainGrouped, linear_fc2=PlainGrouped)
        parts = MoESubmodules(
            experts=ModuleSpec(module=TEGroupedMLP, submodules=grouped),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        )
        mlp = ModuleSpec(module=MoELayer, submodules=parts)
    return models.transformer_layer(ColumnParallelLinear, RowParallelLinear, IdentityOp, mlp)


def configuration(case: TensorParallelCase, device: str) -> TransformerConfig:
    """The configuration of a case; nothing is dropped out."""
    more: dict[str, Any] = {}
    if case.routed:
        more = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": EXPERTS,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_ffn_hidden_size": EXPERT_FFN,
            "moe_shared_expert_intermediate_size": SHARED_FFN,
            "moe_grouped_gemm": True,
            "expert_model_parallel_size": TENSOR_PARALLEL,
            "expert_tensor_parallel_size": 1,
        }
    if case.recompute == "full":
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif case.recompute:
        more |= {"recompute_granularity": "selective", "recompute_modules": case.recompute.split(",")}
    return models.base_configuration(
        device,
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        sequence_parallel=case.sequence_parallel,
        bias_dropout_fusion=True,
        **more,
    )


def build(case: TensorParallelCase, device: str) -> GPTModel:
    """A model of a case in training mode."""
    return models.training_model(configuration(case, device), layer_spec(case), TOKENS, "rope", device)


def inputs(device: str) -> dict[str, Any]:
    """Arguments of a model's forward."""
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device=device)
    places = torch.arange(TOKENS, device=device)[None]
    return {"input_ids": tokens, "position_ids": places, "attention_mask": None, "labels": tokens}


def kept(study: Study, case: TensorParallelCase) -> dict[str, Any]:
    """Bytes that a layer keeps for a token of the micro-batch on one rank, from models of two depths."""
    found = {}
    for layers in DEPTHS:
        forward, clear = calls(study, replace(case, layers=layers))
        for _ in range(2):
            forward().backward()
        found[layers] = kept_bytes(study.device, forward, clear)
    out = slope(found[DEPTHS[0]], found[DEPTHS[1]], DEPTHS[1] - DEPTHS[0], TOKENS)
    return {**out, "models": {str(layers): row for layers, row in found.items()}}


def host(study: Study, case: TensorParallelCase) -> dict[str, Any]:
    """Host time of one layer: the slope between two depths."""
    shallow, deep = (1, 2) if study.dry else (2, 6)
    found = {n: passes(study, *calls(study, replace(case, layers=n))) for n in (shallow, deep)}
    out: dict[str, Any] = {"depths": (shallow, deep)}
    for name in MEASURED:
        for cut in ("us", "p25_us", "p75_us"):
            out[f"{name}_{cut}"] = (found[deep][name][cut] - found[shallow][name][cut]) / (deep - shallow)
    return out


def calls(study: Study, case: TensorParallelCase) -> tuple[Any, Any]:
    """A forward of a model of a case, and what clears its gradients."""
    model, arguments = build(case, study.device), inputs(study.device)

    def forward() -> torch.Tensor:
        return model(**arguments).mean()

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return forward, clear


def run_all(study: Study) -> None:
    """All cases, the most wanted first; every rank runs the same."""
    dense = ("", "core_attn", "mlp", "layernorm", "core_attn,layernorm", "core_attn,layernorm,mlp", "full")
    cases = [TensorParallelCase(sequence_parallel=s, recompute=r) for s in (True, False) for r in dense]
    routed = ("", "layernorm", "moe_act", "shared_experts", "core_attn,layernorm,moe_act", "moe", "full")
    cases += [TensorParallelCase(routed=True, recompute=r) for r in routed]
    for case in cases:
        study.run("blocks", f"kept {case.name}", partial(kept, study, case), 4.0)
    for case in (
        cases[0],
        cases[7],
        cases[14],
        cases[2],
        cases[4],
        cases[6],
        cases[16],
        cases[19],
        cases[20],
    ):
        study.run("blocks", case.name, partial(host, study, case), 5.0)


def shortly(row: dict[str, Any]) -> Any:
    """A layer's medians, or the bytes that it keeps for a token, or what became of it."""
    if "requested_bytes_per_token" in row:
        return f"{row['requested_bytes_per_token']:.1f} B a token, blocks {row['blocks_per_layer']}"
    return short(row)


def main() -> None:
    """Measure and write the results."""
    warnings.simplefilter("ignore")
    options = study_setup.parser(70.0).parse_args()
    if options.dry:
        from lab.studies.host_megatron_dry import imitate_gpu_on_cpu

        imitate_gpu_on_cpu()
        globals()["TOKENS"] = 128
    rank, world = models.start("cpu" if options.dry else "cuda", TENSOR_PARALLEL)
    study = Study(options, "kept_megatron.json", rank)
    study.passes = 3 if options.dry else 15
    describe(study, world)
    conduct(study, run_all, shortly)


if __name__ == "__main__":
    main()
