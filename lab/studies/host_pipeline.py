"""Host time of PyTorch's pipeline runtime: actions, split backward, FSDP2 and DTensor in a micro-batch.

    torchrun --nproc-per-node 2 -m lab.studies.host_pipeline --out DIR --budget 100

A block's time is the difference between two depths of torchtitan's blocks without embedding and head, one
micro-batch, divided by the blocks between them: forward, whole backward, and the backward in the two parts of
`torch.distributed.pipelining`, for inputs and for weights. An action's time is what a micro-batch of one
product takes under a schedule of two stages, without the product, over its actions. Tensors are tiny, so that
the device never limits. A case that fails loses its own row. `--dry` runs every path on a CPU.
"""

from __future__ import annotations

import gc
import time
import warnings
from msgspec.structs import replace
from functools import partial
from typing import Any

from lab.studies import study_setup

if __name__ == "__main__":
    study_setup.prepare()
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from lab.studies import host_blocks_models as models
from lab.studies.host_blocks import describe
from lab.studies.host_blocks_models import TOKENS, BlockCase
from lab.studies.host_blocks_study import Study, block, conduct, spread, wall

WIDTH = 256
PARTS = ("forward", "backward", "inputs", "weights")


def stack(study: Study, case: BlockCase) -> Any:
    """Blocks of a model; under FSDP2 the whole model, as in a micro-batch of a pipeline before the last."""
    model = models.build(case, study.device)
    if not case.fsdp:
        model.tok_embeddings = model.norm = model.output = None
        return model
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model.set_is_last_backward(False)
    for one in model.modules():
        if hasattr(one, "set_reshard_after_forward"):
            one.set_reshard_after_forward(False, recurse=False)
    return model


def inputs(study: Study, case: BlockCase) -> torch.Tensor:
    """A new input of a stack: tokens of a whole model, else hidden states, this rank's part of them."""
    if case.fsdp:
        return torch.randint(0, models.VOCABULARY, (1, TOKENS["tiny"]), device=study.device)
    shape = (1, TOKENS["tiny"] // case.tp, WIDTH)
    return torch.randn(shape, dtype=torch.bfloat16, device=study.device, requires_grad=True)


def steady(study: Study, case: BlockCase) -> dict[str, Any]:
    """Host time of one block in a row of micro-batches that wait for nothing, forward and backward."""
    few, many = 2, 10
    out: dict[str, Any] = {}
    for layers in (2, 6):
        model = stack(study, replace(case, layers=layers))

        def run(count: int, model: Any = model) -> None:
            for _ in range(count):
                y = model(inputs(study, case))
                torch.autograd.backward(y, torch.ones_like(y))

        medians = {n: wall(study, partial(run, n))["us"] for n in (few, many)}
        out[f"{layers} layers_us"] = (medians[many] - medians[few]) / (many - few)
    out["layer_us"] = (out["6 layers_us"] - out["2 layers_us"]) / 4
    return out


def split_times(study: Study, case: BlockCase, split: bool) -> dict[str, Any]:
    """Host time of a stack's forward, backward, and backward in two parts, each from an idle device."""
    model = stack(study, case)
    times: dict[str, list[float]] = {name: [] for name in PARTS}

    def timed(name: str, call: Any, keep: bool) -> Any:
        study.synchronise()
        start = time.perf_counter()
        out = call()
        if keep:
            times[name].append(time.perf_counter() - start)
        study.synchronise()
        return out

    gc.collect()
    gc.disable()
    try:
        for i in range(study.passes + 3):
            keep = i >= 3
            x = inputs(study, case)
            y = timed("forward", lambda x=x: model(x), keep)
            seed = torch.ones_like(y)
            timed("backward", lambda y=y, seed=seed: torch.autograd.backward(y, seed), keep)
            if not split:
                continue
            y = model(x := inputs(study, case))
            _, groups = timed(
                "inputs",
                lambda y=y, x=x, seed=seed: stage_backward_input([y], [seed], [x], model.parameters()),
                keep,
            )
            timed("weights", lambda g=groups: stage_backward_weight(model.parameters(), g), keep)
    finally:
        gc.enable()
    return {name: spread(values) for name, values in times.items() if values}


def split(study: Study, case: BlockCase, in_parts: bool = True) -> dict[str, Any]:
    """Host time of one block by part: the slope between two depths."""
    depths = (1, 2) if study.dry else (2, 6)
    low, high = (split_times(study, replace(case, layers=n), in_parts) for n in depths)
    out: dict[str, Any] = {"depths": depths}
    for name in low:
        for cut in ("us", "p25_us", "p75_us"):
            out[f"{name}_{cut}"] = (high[name][cut] - low[name][cut]) / (depths[1] - depths[0])
        out[f"{name} once_us"] = low[name]["us"] - depths[0] * out[f"{name}_us"]
    return out


class Product(torch.nn.Module):  # type: ignore[misc]
    """One product as a pipeline stage."""

    def __init__(self, device: str) -> None:
        """Make the weight."""
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device) * 0.05
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product."""
        return x @ self.weight


def loss_of(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss of one call."""
    return y.sum()


def runtime(study: Study, name: str) -> dict[str, Any]:
    """Host time of a micro-batch of one product for each stage under a schedule over two ranks."""
    few, many = 8, 24
    kind: Any = schedules.get_schedule_class(name)
    multi = issubclass(kind, schedules.PipelineScheduleMulti)
    zbv = name == "ZBVZeroBubble"
    rank, count = study.rank, 4 if multi else 2
    places = [rank] if not multi else ([rank, 3 - rank] if zbv else [rank, rank + 2])
    parts = [Product(study.device) for _ in places]

    def steps(n: int) -> Any:
        stages = [
            PipelineStage(part, place, count, torch.device(study.device, rank) if study.device == "cuda" else torch.device("cpu"))
            for part, place in zip(parts, places, strict=True)
        ]  # fmt: skip
        schedule = kind(stages if multi else stages[0], n, loss_fn=loss_of)
        x = torch.randn(n, TOKENS["tiny"], WIDTH, dtype=torch.bfloat16, device=study.device)
        first, last = 0 in places, count - 1 in places

        def step() -> None:
            args = (x,) if first else ()
            schedule.step(*args, **({"target": x, "losses": []} if last else {}))

        return step

    def direct(n: int) -> None:
        for _ in range(n):
            for part in parts:
                y = part(torch.empty_like(sample).requires_grad_())
                torch.autograd.backward(y, sample)

    sample = torch.randn(1, TOKENS["tiny"], WIDTH, dtype=torch.bfloat16, device=study.device)
    medians = {n: wall(study, steps(n))["us"] for n in (few, many)}
    plain = {n: wall(study, partial(direct, n))["us"] for n in (few, many)}
    out: dict[str, Any] = {"stages": len(places), "micro-batches": (few, many)}
    out["micro-batch_us"] = (medians[many] - medians[few]) / (many - few)
    out["once_us"] = medians[few] - few * out["micro-batch_us"]
    out["direct, micro-batch_us"] = (plain[many] - plain[few]) / (many - few)
    actions = len(places) * (3 if "ZeroBubble" in name else 2)
    out["per action_us"] = (out["micro-batch_us"] - out["direct, micro-batch_us"]) / actions
    return out


def run_all(study: Study) -> None:
    """All cases, the most wanted first; every rank runs the same."""
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble", "GPipe"):
        study.run("parts", name, partial(runtime, study, name))
    for family in ("llama3", "qwen3_moe", "deepseek_v3"):
        case = BlockCase(family, 0)
        study.run("parts", f"split {case.name}", partial(split, study, case))
    for case in (BlockCase("llama3", 0), BlockCase("llama3", 0, tp=2), BlockCase("qwen3", 0, tp=2)):
        study.run("blocks", case.name, partial(block, study, case))
    for case in (
        BlockCase("llama3", 0, fsdp=2),
        BlockCase("qwen3_moe", 0, fsdp=2, ep=2),
        BlockCase("deepseek_v3", 0, fsdp=2, ep=2),
        BlockCase("llama3", 0, tp=2),
    ):
        study.run("parts", f"kept {case.name}", partial(split, study, case, case.fsdp == 0))
    for case in (BlockCase("llama3", 0), BlockCase("llama3", 0, tp=2), BlockCase("qwen3_moe", 0)):
        study.run("parts", f"steady {case.name}", partial(steady, study, case))
    for case in (
        BlockCase("qwen3_moe", 0),
        BlockCase("deepseek_v3", 0),
        BlockCase("llama3", 0, size="real"),
        BlockCase("llama3", 0, size="real", tp=2),
        BlockCase("llama3", 0, fsdp=2),
    ):
        study.run("blocks", case.name, partial(block, study, case), 5.0)


def short(row: dict[str, Any]) -> Any:
    """A block's two medians, or what became of it."""
    return {k: round(v) for k, v in row.items() if k.endswith("ward_us")} or str(row)[-300:]


def main() -> None:
    """Measure and write the results."""
    warnings.simplefilter("ignore")
    options = study_setup.parser(100.0).parse_args()
    rank, world = models.start_group("cpu" if options.dry else "cuda")
    study = Study(options, "host_pipeline.json", rank)
    describe(study, world)
    conduct(study, run_all, short)


if __name__ == "__main__":
    main()
