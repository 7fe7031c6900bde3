"""Parts of host_blocks.py on two GPUs: FSDP2, expert parallelism, tensor parallelism, loss parallelism."""

from __future__ import annotations

import importlib
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from lab.studies import host_blocks_models as models
from lab.studies.host_blocks_models import TOKENS, VOCABULARY, BlockCase
from lab.studies.host_blocks_study import Study, block, passes, spread


def run_two(study: Study) -> None:
    """All parts on two GPUs, the most wanted first; every rank runs the same cases."""
    cases = [BlockCase(family, 0, fsdp=2) for family in ("llama3", "qwen3_moe")]
    cases += [BlockCase(family, 0, fsdp=2, ep=2) for family in ("qwen3_moe", "deepseek_v3")]
    cases += [BlockCase(family, 0, tp=2) for family in ("llama3", "qwen3")]
    cases += [
        BlockCase("qwen3_moe", 0, fsdp=2, ep=2, checkpoint="op"),
        BlockCase("deepseek_v3", 0, fsdp=2, ep=2, checkpoint="op"),
        BlockCase("llama3", 0, fsdp=2, checkpoint="op"),
        BlockCase("llama3", 0, tp=2, checkpoint="op"),
        BlockCase("qwen3_moe", 0, fsdp=2, ep=2, checkpoint="full"),
        BlockCase("llama3", 0, fsdp=2, checkpoint="full"),
        BlockCase("llama3", 0, tp=2, checkpoint="full"),
    ]
    for case in cases:
        study.run("blocks", case.name, partial(block, study, case))
    for family in ("qwen3_moe", "deepseek_v3"):
        study.run("parts", f"counts {family}", partial(counts, study, family))
    for parallel in (False, True):
        study.run("parts", f"loss, parallel {parallel}", partial(loss, study, parallel))
    case = BlockCase("qwen3_moe", 0, fsdp=2, ep=2, size="real")
    study.run("blocks", case.name, partial(block, study, case), 8.0)
    for case in (
        BlockCase("gpt_oss", 0, fsdp=2, ep=2),
        BlockCase("llama3", 0, tp=2, compile=True),
        BlockCase("qwen3_moe", 0, fsdp=2, ep=2, compile=True),
        BlockCase("llama3", 0, tp=2, compile=True, async_tp=True),
    ):
        study.run("blocks", case.name, partial(block, study, case), 15.0)


def counts(study: Study, family: str) -> dict[str, Any]:
    """Host time of the exchange and reading of token counts in a layer, which waits for the device.

    `waiting` runs from the start of the dispatch to the all-to-all of rows; `rows` is that call itself.
    """
    expert: Any = importlib.import_module("torchtitan.distributed.expert_parallel")
    began = [0.0]
    times: dict[str, list[float]] = {"waiting": [], "rows": [], "dispatch": []}
    dispatch, exchange = expert.ExpertParallel._token_dispatch, expert.all_to_all_single_autograd

    def timed_dispatch(self: Any, mod: Any, inputs: Any, mesh: Any) -> Any:
        began[0] = time.perf_counter()
        out = dispatch(self, mod, inputs, mesh)
        times["dispatch"].append(time.perf_counter() - began[0])
        began[0] = 0.0
        return out

    def timed_exchange(*args: Any) -> Any:
        t0 = time.perf_counter()
        if began[0]:
            times["waiting"].append(t0 - began[0])
        out = exchange(*args)
        times["rows"].append(time.perf_counter() - t0)
        return out

    expert.ExpertParallel._token_dispatch, expert.all_to_all_single_autograd = timed_dispatch, timed_exchange
    try:
        model = models.build(BlockCase(family, 4, fsdp=2, ep=2), study.device)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS["tiny"]), device=study.device)
        for i in range(4 if study.dry else 18):
            if i == 3:
                for kept in times.values():
                    kept.clear()
            y = model(tokens)
            y.backward(torch.ones_like(y))
    finally:
        expert.ExpertParallel._token_dispatch, expert.all_to_all_single_autograd = dispatch, exchange
    return {name: spread(values) for name, values in times.items()}


def loss(study: Study, parallel: bool) -> dict[str, Any]:
    """Host time of norm, head and cross-entropy of a tensor-parallel model without blocks, eager."""
    model = models.build(BlockCase("llama3", 0, tp=2, loss_parallel=parallel), study.device)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS["tiny"]), device=study.device)
    context = importlib.import_module("torch.distributed.tensor.parallel").loss_parallel

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def forward() -> torch.Tensor:
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(0, 1), reduction="sum")

    with context() if parallel else nullcontext():
        out = passes(study, forward, clear)
    dist.barrier()
    return out
