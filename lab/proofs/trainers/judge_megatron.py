"""Lets Megatron-LM's own parser judge exported plans, in an environment of its own.

    python -m venv judge
    judge/bin/pip install torch==2.13.0 triton==3.4.0 numpy einops transformers six omegaconf hydra-core
    PYTHONPATH=<unpacked Megatron-LM tree> judge/bin/python judge_megatron.py plans.json verdicts.json

Every plan goes through the tree's `parse_args`, `validate_args` and `core_transformer_config_from_args`, each
in a process of its own. Nothing is fetched and nothing is trained. As there is no GPU and no Transformer
Engine, three answers are stated instead of asked for: the compute capability (9.0, Hopper), the version of
Transformer Engine (2.9.0), and that its kernels for rotation and permutation are there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
import typing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import typing_extensions
from packaging.version import Version

CAPABILITY = (9, 0)
TRANSFORMER_ENGINE = "2.9.0"
ROTARY_KERNELS = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
PERMUTE_KERNELS = (
    "fused_permute",
    "fused_permute_with_probs",
    "fused_permute_and_pad_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_unpermute",
)
"""Kernels of Transformer Engine that Megatron-LM looks for by name."""


def prepare() -> None:
    """State what a machine with GPUs would answer, and load Megatron-LM once for all plans."""
    if not hasattr(typing, "override"):  # the newest tree wants Python 3.12
        setattr(typing, "override", typing_extensions.override)  # noqa: B010 - unknown to mypy here
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: type("P", (), {"major": 9, "minor": 0})()
    import megatron.core.utils as utils

    utils.get_te_version = lambda: Version(TRANSFORMER_ENGINE)
    utils.is_te_min_version = lambda version, **_: Version(TRANSFORMER_ENGINE) >= Version(version)
    import megatron.core.models.common.embeddings.rope_utils as rope
    import megatron.core.transformer.moe.moe_utils as moe
    import megatron.training.arguments  # noqa: F401

    for module, names in ((rope, ROTARY_KERNELS), (moe, PERMUTE_KERNELS)):
        for name in names:
            if getattr(module, name, None) is None:
                setattr(module, name, prepare)


def judged(plan: dict[str, Any]) -> dict[str, Any]:
    """Verdict on one plan: accepted or not, the message, and what Megatron-LM makes of the arguments."""
    os.environ.update({"WORLD_SIZE": str(plan["gpus"]), "RANK": "0", "LOCAL_RANK": "0"})
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(plan["environment"])
    sys.argv = ["pretrain_gpt.py", *plan["arguments"]]
    spoken = io.StringIO()
    try:
        with contextlib.redirect_stdout(spoken), contextlib.redirect_stderr(spoken):
            facts = understood()
    except (Exception, SystemExit) as error:
        lines = [line for line in spoken.getvalue().splitlines() if line.strip()]
        last = lines[-1] if isinstance(error, SystemExit) and lines else ""
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} {last}".strip()
        return {"accepted": False, "message": f"{message[:400]} ({Path(where.filename).name}:{where.lineno})"}
    return {"accepted": True, "message": "", "facts": facts}


def understood() -> dict[str, Any]:
    """Parse and validate `sys.argv`, build the configuration, and return what it says of the plan."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    args = parse_args()
    validate_args(args, {"tokenizer_type": "HuggingFaceTokenizer"})
    config = core_transformer_config_from_args(args)
    layout = config.pipeline_model_parallel_layout
    vpp = args.virtual_pipeline_model_parallel_size or 1
    stages = None
    if layout is not None:
        stages = [
            [layer.name for layer in layout.layout[rank][chunk]]
            for chunk in range(vpp)
            for rank in range(args.pipeline_model_parallel_size)
        ]
    return {
        "data_parallel": args.data_parallel_size,
        "microbatches": args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        "vpp": vpp,
        "stages": stages,
        "microbatch_group": config.microbatch_group_size_per_vp_stage if vpp > 1 else None,
        "expert_parallel": config.expert_model_parallel_size,
        "expert_tensor_parallel": config.expert_tensor_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "recompute": [config.recompute_granularity, sorted(config.recompute_modules or [])],
        "fp8": [str(config.fp8), str(config.fp8_recipe)] if config.fp8 else None,
        "overlap": [args.overlap_grad_reduce, args.overlap_param_gather],
        "distributed_optimizer": args.use_distributed_optimizer,
        "billions": billions(args),
    }


def billions(args: Any) -> list[str]:
    """Billions of parameters, total and active, as Megatron-LM's own report of memory counts them."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        compute_weight_and_optimizer_memory(args, verbose=True)
    lines = (
        line.rpartition(":") for line in report.getvalue().splitlines() if line.startswith("Total number")
    )
    return [number.strip() for _, _, number in lines]


def main() -> None:
    """Judge every plan of a file."""
    plans_path, verdicts_path = map(Path, sys.argv[1:3])
    plans = json.loads(plans_path.read_text())
    prepare()
    with get_context("fork").Pool(min(2, os.cpu_count() or 1), maxtasksperchild=1) as pool:
        verdicts = pool.map(judged, plans, chunksize=1)
    from megatron.core import package_info

    out = {
        "megatron_core": package_info.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "verdicts": {plan["id"]: verdict for plan, verdict in zip(plans, verdicts, strict=True)},
    }
    verdicts_path.write_text(json.dumps(out))
    refused = [(name, v["message"]) for name, v in out["verdicts"].items() if not v["accepted"]]
    print(f"{len(plans)} plans, {len(refused)} refused by Megatron-LM core {out['megatron_core']}")
    counts: dict[str, list[str]] = {}
    for name, message in refused:
        counts.setdefault(message, []).append(name)
    for message, names in sorted(counts.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):6} {message}   e.g. {names[0]}")


if __name__ == "__main__":
    main()
