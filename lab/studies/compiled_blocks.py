"""Compiled blocks of torchtitan on two GPUs: host time, kept memory, CUDA graphs and tensor parallelism.

    torchrun --nproc-per-node 2 -m lab.studies.compiled_blocks --out DIR --budget 205

Blocks are compiled as torchtitan compiles them, and every compiled case follows its eager one, so that both
meet the host in the same state. Memory is what PyTorch's allocator counts after a forward and not before it.
GEMMs beside collectives of tensor parallelism are PyTorch's fused operators on symmetric memory. The script
writes compiled_blocks.json after every case. A case that fails loses its own row. `--dry` runs every path on
a CPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare(TORCHINDUCTOR_COMPILE_THREADS="8")
import torch

from lab.studies import async_tensor_parallel as split
from lab.studies import host_blocks_models as models
from lab.studies import host_blocks_parts as parts
from lab.studies import host_blocks_two as two
from lab.studies.host_blocks import describe, short
from lab.studies.host_blocks_models import TOKENS, VOCABULARY, BlockCase
from lab.studies.host_blocks_study import Study, block, conduct, launches
from lab.studies.kept_bytes import kept_bytes, slope

MEMORY = (
    *(
        BlockCase(family, 0, size="memory", tp=2, checkpoint=checkpoint)
        for checkpoint in ("none", "op", "2", "full")
        for family in ("llama3", "qwen3")
    ),
    BlockCase("llama3", 0, size="memory"),
    BlockCase("llama3", 0, size="memory", checkpoint="op"),
)
"""Cases whose kept memory is measured alone."""

HOST = (
    BlockCase("llama3", 0),
    BlockCase("qwen3_moe", 0),
    BlockCase("llama3", 0, tp=2),
    BlockCase("qwen3_moe", 0, fsdp=2, ep=2),
    BlockCase("llama3", 0, fsdp=2),
    BlockCase("deepseek_v3", 0),
    BlockCase("llama3", 0, fsdp=2, checkpoint="op"),
    BlockCase("qwen3_moe", 0, fsdp=2, ep=2, checkpoint="op"),
)
"""Cases whose host time is measured eager and compiled."""


def run_all(study: Study) -> None:
    """All parts, the most wanted and the safest first; every rank runs the same cases."""
    for case in MEMORY:
        study.run("blocks", f"kept {case.name}", partial(kept, study, case))
    for family in ("llama3", "qwen3_moe"):
        study.run("parts", f"graphs {family}", partial(parts.graphs, study, family))
    for case in HOST[:5]:
        both(study, case)
    for name, call in split.parts(study):
        study.run("parts", name, call)
    for asynchronous in (False, True):
        case = BlockCase("llama3", 0, size="large", tp=2, compile=True, async_tp=asynchronous)
        study.run("blocks", case.name, partial(fused_block, study, case), 18.0)
    for case in HOST[5:]:
        both(study, case)
    for checkpoint in ("none", "op"):
        case = BlockCase("llama3", 0, size="memory", tp=2, checkpoint=checkpoint, compile=True)
        study.run("blocks", f"kept {case.name}", partial(kept, study, case), 15.0)
    models.forget_compiled()
    for parallel in (False, True):
        study.run("parts", f"loss, parallel {parallel}", partial(two.loss, study, parallel))
    for family in ("qwen3_moe", "deepseek_v3"):
        study.run("parts", f"counts {family}", partial(two.counts, study, family))


def both(study: Study, case: BlockCase) -> None:
    """Measure a case eager, then compiled; plain blocks also with the launches of the compiled one."""
    compiled = BlockCase(**{**vars(case), "compile": True})
    study.run("blocks", case.name, partial(block, study, case), 5.0)
    study.run("blocks", compiled.name, partial(block, study, compiled), 15.0)
    if not case.fsdp and case.tp == 1:
        study.run("parts", f"launches {compiled.name}", partial(launches, study, compiled), 8.0)


def kept(study: Study, case: BlockCase) -> dict[str, Any]:
    """Bytes that a layer of a case keeps for a token, from models of two and of four layers."""
    models.forget_compiled()
    found = {}
    for layers in (2, 4):
        model = models.build(BlockCase(**{**vars(case), "layers": layers}), study.device)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS[case.size]), device=study.device)
        out = model(tokens)
        out.backward(torch.ones_like(out))
        del out

        def clear(model: Any = model) -> None:
            for parameter in model.parameters():
                parameter.grad = None

        found[layers] = kept_bytes(study.device, partial(model, tokens), clear)
        del model
    out = slope(found[2], found[4], 2, TOKENS[case.size])
    return {**out, "models": {str(layers): row for layers, row in found.items()}}


def fused_block(study: Study, case: BlockCase) -> dict[str, Any]:
    """Times of a compiled block of real size, and how often its model calls the fused operators."""
    from torch.profiler import ProfilerActivity, profile

    out = block(study, case)
    model = models.build(BlockCase(**{**vars(case), "layers": 2}), study.device)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS[case.size]), device=study.device)
    for _ in range(2):
        y = model(tokens)
        y.backward(torch.ones_like(y))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        y = model(tokens)
        y.backward(torch.ones_like(y))
        study.synchronise()
    names = [event.name for event in seen.events()]
    wanted = ("all_gather", "reduce_scatter", "all_reduce")
    calls = {name: names.count(name) for name in set(names) if any(word in name for word in wanted)}
    return {**out, "calls of two blocks": calls}


def main() -> None:
    """Measure and write the results."""
    options = study_setup.parser(205.0).parse_args()
    rank, world = models.start_group("cpu" if options.dry else "cuda")
    study = Study(options, "compiled_blocks.json", rank)
    describe(study, world)
    conduct(study, run_all, shortly)


def shortly(row: dict[str, Any]) -> Any:
    """A block's medians, or the bytes that it keeps for a token, or what became of it."""
    if "forward_us" not in row and "requested_bytes_per_token" in row:
        return f"{row['requested_bytes_per_token']:.1f} B a token, blocks {row['blocks_per_layer']}"
    return short(row)


if __name__ == "__main__":
    main()
