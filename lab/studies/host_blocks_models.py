"""Small models of torchtitan whose blocks host_blocks.py measures, and how they are wrapped.

The model code, its parallelisation and its checkpoints are torchtitan's own; only sizes are chosen here. They
are small, so that the device never limits, or `real`, so that it does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "llama3": {
        "tiny": {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 64},
        "real": {"dim": 3072, "n_heads": 24, "n_kv_heads": 8, "multiple_of": 256},
        "memory": {"dim": 1024, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 256},
        "large": {
            "dim": 8192,
            "n_heads": 64,
            "n_kv_heads": 8,
            "multiple_of": 1024,
            "ffn_dim_multiplier": 1.3,
        },
    },
    "qwen3": {
        "tiny": {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "hidden_dim": 512},
        "real": {"dim": 3072, "n_heads": 24, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 8192},
        "memory": {"dim": 1024, "n_heads": 12, "n_kv_heads": 4, "head_dim": 64, "hidden_dim": 3072},
    },
    "qwen3_moe": {
        "tiny": {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "moe_inter_dim": 128},
        "real": {"dim": 1536, "n_heads": 24, "n_kv_heads": 4, "head_dim": 128, "moe_inter_dim": 640},
    },
    "deepseek_v3": {
        "tiny": {"dim": 256, "n_heads": 4, "moe_inter_dim": 128, "q_lora_rank": 0, "kv_lora_rank": 64},
        "real": {"dim": 1536, "n_heads": 12, "moe_inter_dim": 1152, "q_lora_rank": 0, "kv_lora_rank": 384},
    },
    "deepseek_v3_groups": {
        "tiny": {"dim": 256, "n_heads": 4, "moe_inter_dim": 128, "q_lora_rank": 96, "kv_lora_rank": 64},
    },
    "gpt_oss": {
        "tiny": {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "moe_inter_dim": 128},
        "real": {"dim": 1536, "n_heads": 24, "n_kv_heads": 8, "head_dim": 64, "moe_inter_dim": 1536},
    },
}
"""Sizes of the models, by family."""

TOKENS = {"tiny": 128, "memory": 2048, "real": 4096, "large": 8192}
VOCABULARY = 512


@dataclass(frozen=True)
class BlockCase:
    """A family of models, and what wraps its blocks."""

    family: str
    layers: int
    size: str = "tiny"
    fsdp: int = 0  # members of the FSDP2 group; 0 without FSDP
    checkpoint: str = "none"  # none, op (selective, by operator), full, or every n-th layer ("2")
    compile: bool = False
    ep: int = 1
    tp: int = 1
    loss_parallel: bool = False
    async_tp: bool = False

    @property
    def name(self) -> str:
        """Name of the case without its depth."""
        parts = [self.family, self.size]
        parts += [f"fsdp{self.fsdp}"] * bool(self.fsdp) + [f"ep{self.ep}"] * (self.ep > 1)
        parts += [f"tp{self.tp}"] * (self.tp > 1) + ["async-tp"] * self.async_tp
        parts += ["compiled"] * self.compile + [f"checkpoint-{self.checkpoint}"] * (self.checkpoint != "none")
        return " ".join(parts)


def load_torchtitan() -> str:
    """Make torchtitan's model code importable without data loaders and command line; return its version."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torchtitan is not on the path")
    root = Path(spec.submodule_search_locations[0])
    _package("torchtitan", root)
    for model in ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss"):
        _package(f"torchtitan.models.{model}", root / "models" / model)
    if importlib.util.find_spec("tyro") is None:
        tyro: Any = types.ModuleType("tyro")
        nothing = type("Nothing", (), {})
        tyro.constructors = types.SimpleNamespace(
            ConstructorRegistry=nothing, PrimitiveTypeInfo=nothing, PrimitiveConstructorSpec=nothing
        )
        sys.modules["tyro"] = tyro
    protocol = importlib.import_module("torchtitan.protocols.model")
    train_spec: Any = types.ModuleType("torchtitan.protocols.train_spec")
    train_spec.ModelProtocol, train_spec.BaseModelArgs = protocol.ModelProtocol, protocol.BaseModelArgs
    sys.modules["torchtitan.protocols.train_spec"] = train_spec
    _plain_experts()
    return _version(root)


def _package(name: str, path: Path) -> None:
    module = types.ModuleType(name)
    module.__path__ = [str(path)]
    sys.modules[name] = module


def _version(root: Path) -> str:
    return next((p.name.split("-")[1] for p in root.parent.glob("torchtitan-*.dist-info")), "unknown")


def imitate_gpu_on_cpu() -> None:
    """Replace what torchtitan's MoE code cannot do on a CPU, for a dry run."""
    utils: Any = importlib.import_module("torchtitan.models.moe.utils")
    permute = utils.generate_permute_indices
    utils.generate_permute_indices = lambda rows, *args: permute(rows.long(), *args, use_cpu=True)
    for size in ("memory", "real", "large"):
        TOKENS[size] = TOKENS["tiny"]
        for sizes in SIZES.values():
            sizes[size] = sizes["tiny"]
    histogram = torch.histc
    torch.histc = lambda x, *args, **kwargs: histogram(x.float(), *args, **kwargs).to(x.dtype)
    wrapper = importlib.import_module("torchtitan.models.attention").FlexAttentionWrapper

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> Any:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (y, y.float().mean(-1)) if more.get("return_lse") else y

    wrapper._compiled_flex_attn = plain
    backends = importlib.import_module("torchtitan.models.attention").ScaledDotProductAttentionWrapper
    backends.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]


def use_untuned_flex_attention() -> None:
    """Compile flex attention without tuning, which changes kernels and not the host's calls."""
    attention = importlib.import_module("torchtitan.models.attention")
    attention.FlexAttentionWrapper._compiled_flex_attn = torch.compile(
        attention.flex_attention, options={"wrap_inductor_compiled_regions": True}
    )


def _arguments(case: BlockCase) -> tuple[Any, Any]:
    """The model class and its arguments."""
    module = case.family.removesuffix("_moe").removesuffix("_groups")
    args = importlib.import_module(f"torchtitan.models.{module}.model.args")
    model = importlib.import_module(f"torchtitan.models.{module}.model.model")
    sizes = SIZES[case.family][case.size] | {
        "n_layers": case.layers,
        "vocab_size": VOCABULARY,
        "max_seq_len": TOKENS[case.size],
    }
    if module == "llama3":
        return model.Transformer, args.TransformerModelArgs(**sizes)
    moe: Any = importlib.import_module("torchtitan.models.moe").MoEArgs
    experts = 16 if case.size == "tiny" else 48
    shared: dict[str, Any] = {"num_experts": experts, "top_k": 4, "score_before_experts": False}
    if case.family == "qwen3":
        return model.Qwen3Model, args.Qwen3ModelArgs(**sizes)
    if case.family == "qwen3_moe":
        own = moe(**shared, num_shared_experts=0, score_func="softmax", route_norm=True)
        return model.Qwen3Model, args.Qwen3ModelArgs(**sizes, moe_enabled=True, moe_args=own)
    if module == "deepseek_v3":
        groups = {"num_expert_groups": 4, "num_limited_groups": 2} if case.family.endswith("groups") else {}
        score = {"score_func": "sigmoid", "route_norm": True} if groups else {"score_func": "softmax"}
        own = moe(**shared, num_shared_experts=1, **groups, **score)
        sizes |= {"n_dense_layers": 0, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
        out = args.DeepSeekV3ModelArgs(**sizes, moe_args=own)
        out.moe_impl = "standard"
        return model.DeepSeekV3Model, out
    own = moe(**shared, num_shared_experts=0, score_func="softmax", route_norm=True, gate_bias=True)
    return model.GptOssModel, args.GptOssModelArgs(**sizes, moe_args=own)


@cache
def meshes(device: str, ep: int) -> dict[str, Any]:
    """The meshes over all ranks; they are made once, so that no case waits for new communicators."""
    ranks = dist.get_world_size()
    world: Any = dist.device_mesh.init_device_mesh(device, (ranks,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (ranks,), ("fsdp",))
    sparse = world._unflatten(0, (ranks // ep, ep), ("efsdp", "ep")) if ep > 1 else None
    return {"world": world, "dense": dense, "sparse": sparse}


def build(case: BlockCase, device: str) -> Any:
    """A model on the device, parallelised as torchtitan does it, in BF16, or in FP32 under FSDP's casts."""
    torch.manual_seed(0)
    kind, arguments = _arguments(case)
    with torch.device(device):
        model = kind(arguments)
    with torch.no_grad():
        model.init_weights(torch.device(device))
    if not case.fsdp:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    module = case.family.removesuffix("_moe").removesuffix("_groups")
    plan = importlib.import_module(f"torchtitan.models.{module}.infra.parallelize")
    llama4 = importlib.import_module("torchtitan.models.llama4.infra.parallelize")
    if case.tp > 1:
        _tensor_parallel(model, plan, case, meshes(device, case.ep)["world"])
    if case.ep > 1:
        sparse = meshes(device, case.ep)["sparse"]
        llama4.apply_moe_ep_tp(model, tp_mesh=None, ep_mesh=sparse["ep"], etp_mesh=None, ep_etp_mesh=None)
    if case.checkpoint != "none":
        config = importlib.import_module("torchtitan.config.job_config").ActivationCheckpoint(
            mode="full" if case.checkpoint == "full" else "selective",
            selective_ac_option="op" if case.checkpoint == "full" else case.checkpoint,
        )
        wrap = importlib.import_module("torchtitan.distributed.activation_checkpoint").apply_ac
        wrap(model, config, model_compile_enabled=case.compile, op_sac_save_list=plan._op_sac_save_list)
    if case.compile:
        _compile(model, plan, llama4, case)
    if case.fsdp:
        own = meshes(device, case.ep)
        shard = plan.apply_fsdp if module == "llama3" else llama4.apply_fsdp
        more = {} if module == "llama3" else {"ep_degree": case.ep}
        more |= {"edp_mesh": own["sparse"]["efsdp"]} if case.ep > 1 else {}
        types_of = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        shard(model, own["dense"], **types_of, pp_enabled=False, **more)
        if device == "cpu":  # gloo cannot multiply before it adds
            for one in model.modules():
                if hasattr(one, "set_force_sum_reduction_for_comms"):
                    one.set_force_sum_reduction_for_comms(True)
    return model


@cache
def _plain_experts() -> Any:
    """torchtitan's function of the experts before any model was compiled."""
    return importlib.import_module("torchtitan.models.moe.moe")._run_experts_grouped_mm


def forget_compiled() -> None:
    """Drop what was compiled, and undo what torchtitan changes in PyTorch and itself to compile a model."""
    import torch._dynamo.utils
    import torch._inductor.config

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._C._dynamo.eval_frame._set_lru_cache(True)
    torch._inductor.config._micro_pipeline_tp = False
    experts: Any = importlib.import_module("torchtitan.models.moe.moe")
    experts._run_experts_grouped_mm = _plain_experts()


def _tensor_parallel(model: Any, plan: Any, case: BlockCase, mesh: Any) -> None:
    """Apply torchtitan's tensor and sequence parallelism."""
    more = {} if case.family == "llama3" else {"enable_async_tp": False}
    apply = plan.apply_tp if case.family == "llama3" else plan.apply_non_moe_tp
    more |= {"cp_enabled": False}
    apply(model, mesh, loss_parallel=case.loss_parallel, enable_float8_tensorwise_tp=False, **more)
    if case.async_tp:
        import torch._inductor.config

        torch._inductor.config._micro_pipeline_tp = True
        if (
            mesh.device_type == "cuda"
        ):  # without it the compiler of torch 2.11 leaves the collectives as they are
            symmetric = importlib.import_module("torch.distributed._symmetric_memory")
            symmetric.enable_symm_mem_for_group(mesh.get_group().group_name)


def _compile(model: Any, plan: Any, llama4: Any, case: BlockCase) -> None:
    """Compile each block as torchtitan does."""
    config = importlib.import_module("torchtitan.config.job_config").Compile(enable=True)
    if case.family == "llama3":
        plan.apply_compile(model, config)
    else:
        llama4.apply_compile(model, config, case.ep > 1)


def attention_masks(case: BlockCase, tokens: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments with the attention masks that a family's forward needs."""
    if case.family != "gpt_oss":
        return {}
    attention = importlib.import_module("torchtitan.models.attention")
    length = tokens.shape[1]
    flex = torch.nn.attention.flex_attention
    make = partial(
        flex.create_block_mask, B=1, H=None, Q_LEN=length, KV_LEN=length, device=tokens.device.type
    )
    causal = attention.get_causal_mask_mod()
    window = flex.and_masks(causal, attention.get_sliding_window_mask_mod(64))
    return {"attention_masks": {"basic_mask": make(causal), "sliding_window_mask": make(window)}}


def start_group(device: str) -> tuple[int, int]:
    """Start the process group of torchrun, or of one process; return the rank and the world's size."""
    backend = "nccl" if device == "cuda" else "gloo"
    if "LOCAL_RANK" in os.environ:
        rank = int(os.environ["LOCAL_RANK"])
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    return dist.get_rank(), dist.get_world_size()
