"""Parts of host_blocks.py on one GPU: blocks, CUDA graphs, garbage collection, optimizer, single calls."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from lab.studies import host_blocks_models as models
from lab.studies.host_blocks_models import TOKENS, VOCABULARY, BlockCase
from lab.studies.host_blocks_study import Study, block, launches, passes, spread

CHAIN = 60
FAMILIES = ("llama3", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v3_groups")


def run_one(study: Study) -> None:
    """All parts on one GPU, the most wanted first."""
    study.run("parts", "single calls", partial(single_calls, study))
    for family in FAMILIES:
        study.run("blocks", BlockCase(family, 0).name, partial(block, study, BlockCase(family, 0)))
    for checkpoint in ("none", "op", "full"):
        for family in ("llama3", "qwen3_moe", "deepseek_v3"):
            case = BlockCase(family, 0, fsdp=1, checkpoint=checkpoint)
            study.run("blocks", case.name, partial(block, study, case))
    for family in FAMILIES:
        case = BlockCase(family, 0)
        study.run("parts", f"launches {case.name}", partial(launches, study, case))
    study.run("parts", "optimizer", partial(optimizer, study))
    study.run("parts", "garbage collection", partial(garbage, study), 12.0)
    for family in ("llama3", "qwen3_moe"):
        study.run("parts", f"graphs {family}", partial(graphs, study, family))
    for family in ("llama3", "qwen3_moe"):
        case = BlockCase(family, 0, fsdp=1, size="real")
        study.run("blocks", case.name, partial(block, study, case))
    for case in (BlockCase("gpt_oss", 0), BlockCase("gpt_oss", 0, fsdp=1, checkpoint="op")):
        study.run("blocks", case.name, partial(block, study, case), 15.0)
    study.run("parts", "launches gpt_oss tiny", partial(launches, study, BlockCase("gpt_oss", 0)))
    for case in (
        BlockCase("llama3", 0, compile=True),
        BlockCase("llama3", 0, fsdp=1, checkpoint="op", compile=True),
        BlockCase("qwen3_moe", 0, fsdp=1, compile=True),
        BlockCase("qwen3_moe", 0, fsdp=1, checkpoint="op", compile=True),
    ):
        study.run("blocks", case.name, partial(block, study, case), 15.0)
    if not study.dry:
        case = BlockCase("gpt_oss", 0, fsdp=1, size="real")
        study.run("blocks", case.name, partial(block, study, case), 15.0)


def single_calls(study: Study) -> dict[str, Any]:
    """Host time of single calls in chains, to tie this machine to the one of the earlier measurement."""
    device, n = study.device, 128
    randn = partial(torch.randn, device=device, dtype=torch.bfloat16)
    weights = [randn(n, n).requires_grad_() for _ in range(CHAIN)]
    gains = [randn(n).requires_grad_() for _ in range(CHAIN)]
    chains: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], tuple[int, ...]]] = {
        "linear": (lambda y, j: F.linear(y, weights[j]), (n, n)),
        "rms_norm": (lambda y, j: F.rms_norm(y, (n,), gains[j]), (n, n)),
        "silu": (lambda y, j: F.silu(y), (n, n)),
        "add": (lambda y, j: y + y, (n, n)),
        "sdpa": (lambda y, j: F.scaled_dot_product_attention(y, y, y, is_causal=True), (1, 4, n, 64)),
    }
    out: dict[str, Any] = {}
    for name, (step, shape) in chains.items():

        def forward(
            step: Callable[[torch.Tensor, int], torch.Tensor] = step, shape: tuple[int, ...] = shape
        ) -> torch.Tensor:
            y = randn(*shape).requires_grad_()
            for j in range(CHAIN):
                y = step(y, j)
            return y

        def clear() -> None:
            for parameter in (*weights, *gains):
                parameter.grad = None

        row = passes(study, forward, clear)
        out[name] = {f"{k}_us": row[k]["us"] / CHAIN for k in ("forward", "backward")}
    return out


class WholeBlock(torch.nn.Module):  # type: ignore[misc]
    """One block with its constants, called with a tensor only, so that a CUDA graph can hold it."""

    def __init__(self, block: Any, constant: torch.Tensor) -> None:
        """Keep the block and the table of its rotary embedding."""
        super().__init__()
        self.block, self.constant = block, constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y: torch.Tensor = self.block(x, self.constant, None)
        return y


class FirstHalf(torch.nn.Module):  # type: ignore[misc]
    """The norm and attention of a block, with the residual."""

    def __init__(self, block: Any, constant: torch.Tensor) -> None:
        """Keep the two modules, and no other parameter of the block."""
        super().__init__()
        self.norm, self.attention, self.constant = block.attention_norm, block.attention, constant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a block's first half."""
        y: torch.Tensor = x + self.attention(self.norm(x), self.constant, None, None)
        return y


class SecondHalf(torch.nn.Module):  # type: ignore[misc]
    """The norm and feed-forward of a block, with the residual."""

    def __init__(self, block: Any) -> None:
        """Keep the two modules."""
        super().__init__()
        self.norm = block.ffn_norm
        self.feed_forward = block.moe if hasattr(block, "moe") else block.feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of a block's second half."""
        y: torch.Tensor = x + self.feed_forward(self.norm(x))
        return y


GRAPH_LAYERS = 6


def graphs(study: Study, family: str) -> dict[str, Any]:
    """Host time of a block without graphs, with its attention, its whole or the whole iteration in one."""
    out: dict[str, Any] = {}
    for mode in ("none", "layer", "attention", "iteration"):
        try:
            out[mode] = graphed(study, family, mode)
        except Exception as error:
            out[mode] = {"failed": repr(error)[-600:]}
    return out


def graphed(study: Study, family: str, mode: str) -> dict[str, Any]:
    """Host microseconds of one block of a stack that replays what `mode` says."""
    model = models.build(BlockCase(family, GRAPH_LAYERS), study.device)
    study.synchronise()
    time.sleep(0.3)  # the watchdog of the process group asks for no event while a graph is captured
    constant = model.rope_cache if hasattr(model, "rope_cache") else model.freqs_cis
    blocks = list(model.layers.values())
    x = torch.randn(1, TOKENS["tiny"], 256, device=study.device, dtype=torch.bfloat16).requires_grad_()
    calls: list[Any] = []
    for one in blocks:
        if mode == "attention":
            calls += [captured(study, FirstHalf(one, constant), x), SecondHalf(one)]
        else:
            whole = WholeBlock(one, constant)
            calls.append(captured(study, whole, x) if mode == "layer" else whole)

    def clear() -> None:
        for one in blocks:
            for parameter in one.parameters():
                parameter.grad = None

    def forward() -> torch.Tensor:
        y = x
        for call in calls:
            y = call(y)
        return y

    if mode == "iteration":
        return whole_iteration(study, forward, clear)
    row = passes(study, forward, clear)
    return {f"{name}_us": row[name]["us"] / GRAPH_LAYERS for name in row}


def captured(study: Study, module: Any, x: torch.Tensor) -> Any:
    """The module as a CUDA graph of its forward and one of its backward; the module itself in a dry run."""
    sample = x.detach().clone().requires_grad_()
    return (
        module if study.dry else torch.cuda.make_graphed_callables(module, (sample,), allow_unused_input=True)
    )


def whole_iteration(
    study: Study, forward: Callable[[], torch.Tensor], clear: Callable[[], None]
) -> dict[str, Any]:
    """Host time of a block where one graph holds the forward and backward of the stack."""
    seed = torch.ones_like(forward())

    def step() -> None:
        clear()
        forward().backward(seed)

    replay: Callable[[], None] = step
    if not study.dry:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    times, done = [], []
    for _ in range(study.passes):
        study.synchronise()
        t0 = time.perf_counter()
        replay()
        times.append((time.perf_counter() - t0) / GRAPH_LAYERS)
        study.synchronise()
        done.append((time.perf_counter() - t0) / GRAPH_LAYERS)
    return {"both": spread(times), "both_done": spread(done)}


def optimizer(study: Study) -> dict[str, Any]:
    """Host time of the optimizer step, the clipping and the clearing of gradients, for two depths."""
    clip = importlib.import_module("torchtitan.distributed.utils").clip_grad_norm_
    out: dict[str, Any] = {}
    for members in (0, 1):
        for layers in (6, 24):
            model = models.build(BlockCase("qwen3_moe", layers, fsdp=members), study.device)
            tokens = torch.randint(0, VOCABULARY, (1, TOKENS["tiny"]), device=study.device)
            y = model(tokens)
            y.backward(torch.ones_like(y))
            parameters = list(model.parameters())
            row: dict[str, Any] = {"parameters": len(parameters)}
            for kind in ("fused", "foreach"):
                adam = torch.optim.AdamW(parameters, lr=1e-6, **{kind: True})
                row[f"step {kind}"] = spread(_repeated(study, adam.step))
            row["clip"] = spread(_repeated(study, partial(clip, parameters, 1.0, foreach=True)))
            times = []
            for _ in range(5):
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                t0 = time.perf_counter()
                adam.zero_grad()
                times.append(time.perf_counter() - t0)
            row["zero_grad"] = {"us": statistics.median(times) * 1e6}
            out[f"fsdp{members}, {layers} layers"] = row
    return out


def _repeated(study: Study, call: Callable[[], Any]) -> list[float]:
    """Host seconds of a call from an idle device, of 11 after 2."""
    times = []
    for i in range(4 if study.dry else 13):
        study.synchronise()
        t0 = time.perf_counter()
        call()
        if i >= 2:
            times.append(time.perf_counter() - t0)
    study.synchronise()
    return times


def garbage(study: Study) -> dict[str, Any]:
    """Python's garbage collections in steps of a deep model: how many, how long, the steps with and without.

    `fixed` runs as torchtitan does: no automatic collection; one of generation 1 after the steps.
    """
    layers, steps = (2, 2) if study.dry else (24, 7)
    model = models.build(BlockCase("qwen3_moe", layers, fsdp=1), study.device)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=study.device == "cuda")
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS["tiny"]), device=study.device)
    log: list[tuple[int, float]] = []
    began = [0.0]

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            log.append((info["generation"], time.perf_counter() - began[0]))

    def step() -> float:
        study.synchronise()
        t0 = time.perf_counter()
        y = model(tokens)
        y.backward(torch.ones_like(y))
        adam.step()
        adam.zero_grad()
        return time.perf_counter() - t0

    out: dict[str, Any] = {"layers": layers, "thresholds": gc.get_threshold()}
    step()
    gc.callbacks.append(seen)
    for mode in ("automatic", "fixed"):
        gc.collect()
        out[f"objects {mode}"] = len(gc.get_objects())
        log.clear()
        (gc.enable if mode == "automatic" else gc.disable)()
        times = [step() for _ in range(steps)]
        out[mode] = {
            "step": spread(times),
            "steps": steps,
            "collections": [
                [sum(g == n for g, _ in log), sum(s for g, s in log if g == n)] for n in range(3)
            ],
            "longest_s": max((s for _, s in log), default=0.0),
        }
        log.clear()
        for generation in (1, 2):
            t0 = time.perf_counter()
            gc.collect(generation)
            out[mode][f"collect {generation} after the steps, s"] = time.perf_counter() - t0
    gc.callbacks.remove(seen)
    gc.enable()
    return out
