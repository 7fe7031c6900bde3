"""torchtitan's trainer with random tokens and the models of `own-runs.yaml`, on two GPUs or, tiny, on CPU."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

REMARKS = (
    "tokenizer, data loader and command line are replaced: random tokens, configuration built in Python",
    "gpt-oss: torchtitan casts its blocks to BF16 when it builds them; they are cast back to FP32, which "
    "training.dtype asks for",
    "gpt-oss: flex_attention is compiled without max_autotune and coordinate descent, to save device time",
)
ABSENT = ("datasets", "datasets.distributed", "torchdata", "torchdata.stateful_dataloader", "tyro", "tomli")


class _Absent:
    """Stands for a class or function of a package that is not needed here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept anything."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Stand for a decorator."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Stand for what belongs to it."""
        return _Absent()


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent if name[0].isupper() else _Absent()


def stand_in_for_absent_packages() -> None:
    """Put empty modules where torchtitan imports a data loader or a command-line parser."""
    for name in ABSENT:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__file__ = None
        module.__getattr__ = _absent  # type: ignore[method-assign]
        sys.modules[name] = module


class RandomTokens:
    """An endless loader of random tokens, another stream on every rank."""

    def __init__(self, vocabulary: int, batch: int, sequence: int, rank: int) -> None:
        """Draw eight batches in advance."""
        made = torch.Generator().manual_seed(1000 + rank)
        self.batches = [torch.randint(0, vocabulary, (batch, sequence + 1), generator=made) for _ in range(8)]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield inputs and labels, shifted by one."""
        while True:
            for tokens in self.batches:
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]


def tiny(arguments: dict[str, Any], moe: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes for a dry run on CPU."""
    small = {"vocab_size": 256, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    small |= {"moe_inter_dim": 32, "max_seq_len": 128}
    if "sliding_window_size" in arguments:
        small |= {"sliding_window_size": 16, "head_dim": 32}
    return {**arguments, **small}, {**moe, "num_experts": 8, "top_k": 2}


def built_spec(name: str, model: dict[str, Any], run: dict[str, Any], dry: bool) -> str:
    """Register torchtitan's own train spec with our sizes and loader, and return its name."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    titan = model["torchtitan"]
    arguments, moe = dict(titan["arguments"]), dict(titan["moe"])
    if dry:
        arguments, moe = tiny(arguments, moe)
    base = importlib.import_module(f"torchtitan.models.{titan['spec']}").get_train_spec()
    kind = type(next(iter(base.model_args.values())))
    args = kind(**arguments, moe_args=MoEArgs(**moe, _debug_force_load_balance=True))
    sequence = 128 if dry else run["sequence"]

    def loader(dp_rank: int, **_: Any) -> RandomTokens:
        return RandomTokens(args.vocab_size, run["microbatch"], sequence, dp_rank)

    def parallelize(module: torch.nn.Module, *rest: Any) -> torch.nn.Module:
        return base.parallelize_fn(module.float() if titan["spec"] == "gpt_oss" else module, *rest)

    values = {key: getattr(base, key) for key in TrainSpec.__dataclass_fields__}
    values |= {
        "model_args": {"own": args},
        "parallelize_fn": parallelize,
        "build_dataloader_fn": loader,
        "build_tokenizer_fn": lambda _: object(),
        "state_dict_adapter": None,
        "build_validator_fn": None,
    }
    register_train_spec(name, TrainSpec(**values))
    return name


def configuration(spec: str, run: dict[str, Any], ranks: int, dry: bool) -> Any:
    """torchtitan's configuration of a run; what is not set has its default."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.model.name, config.model.flavor = spec, "own"
    config.training.local_batch_size = run["microbatch"]
    config.training.seq_len = 128 if dry else run["sequence"]
    config.training.steps = 10_000
    config.training.dtype = "float32"
    config.parallelism.data_parallel_shard_degree = ranks
    config.parallelism.expert_parallel_degree = ranks
    config.activation_checkpoint.mode = {"none": "none", "op": "selective", "full": "full"}[run["recompute"]]
    config.activation_checkpoint.selective_ac_option = "op"
    config.debug.moe_force_load_balance = True
    config.metrics.log_freq = 1
    config.checkpoint.enable = False
    if dry:
        config.optimizer.implementation = "for-loop"
    return config


def flex_without_search() -> None:
    """Compile torchtitan's flex_attention with its default blocks."""
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.attention import FlexAttentionWrapper

    FlexAttentionWrapper._compiled_flex_attn = torch.compile(flex_attention)


def causal_without_sinks() -> None:
    """Fallback: causal attention of a library without windows; sinks scale the output by a constant."""
    from torchtitan.models.attention import FlexAttentionWrapper

    def forward(self: Any, q: Any, k: Any, v: Any, *, scale: float, enable_gqa: bool, **_: Any) -> Any:
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        return out, torch.zeros(q.shape[:3], device=q.device)

    FlexAttentionWrapper.forward = forward


def on_cpu() -> None:
    """Replace what has no CPU version: the Triton kernel of the permutation, and device memory."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    import torchtitan.models.moe.utils as moe
    from torchtitan.components import metrics
    from torchtitan.models import attention

    made = moe.generate_permute_indices
    moe.generate_permute_indices = lambda *values: made(*values, use_cpu=True)
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama4.infra import parallelize

    def summed(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    parallelize.disable_fsdp_gradient_division = summed
    torch.histc = lambda x, bins, **_: torch.bincount(x, minlength=bins)
    attention._compiled_create_block_mask = attention.create_block_mask

    class NoMemory:
        device_name = "cpu"

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None:
            """Nothing to reset."""

    metrics.build_device_memory_monitor = NoMemory


def start_processes() -> None:
    """Form torchtitan's process group once; every run takes the same."""
    from torchtitan.config import JobConfig
    from torchtitan.distributed import utils

    comm = JobConfig().comm
    comm.init_timeout_seconds, comm.trace_buf_size = 120, 0
    utils.init_distributed(comm)
