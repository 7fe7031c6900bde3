"""What PyTorch's CUDA allocator reserves: random sequences of allocations, and steps of small models.

    python -m lab.studies.allocator --out DIR [--seconds 75] [--cpu]

One GPU is enough. Collectives of FSDP2 move nothing (a process group of 8 ranks without peers), so buffers
and streams are those of 8 ranks. The script writes allocator.json and rewrites it after every part; a part
that fails is reported and the others continue. `--cpu` runs every path with tiny sizes without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

SEQUENCES, BUSY_SEQUENCES, EXPANDABLE_SEQUENCES = 100, 28, 40


def sequences_part(sequences: ModuleType, cpu: bool, deadline: float) -> list[dict[str, Any]]:
    """Reserved, active and allocated bytes of every random sequence, from an empty allocator each."""
    import torch

    rows: list[dict[str, Any]] = []
    counts = (("idle", SEQUENCES), ("busy", BUSY_SEQUENCES), ("expandable", EXPANDABLE_SEQUENCES))
    for kind, count in counts:
        if not cpu:
            _expand(kind == "expandable")
        for seed in range(3 if cpu else count):
            if time.perf_counter() > deadline:
                break
            row: dict[str, Any] = {"seed": seed, "kind": kind}
            rows.append(row)
            try:
                if not cpu:
                    torch.cuda.synchronize()
                    gc.collect()
                    torch.cuda.empty_cache()
                    row["before"] = torch.cuda.memory_reserved()
                started = time.perf_counter()
                row["bytes"], row["stayed_busy"] = sequences.replay_on_device(
                    sequences.random_sequence(seed, kind == "busy"), cpu
                )
                row["seconds"] = round(time.perf_counter() - started, 4)
            except Exception:
                row["failed"] = traceback.format_exc()[-400:]
    if not cpu:
        _expand(False)
    return rows


def _expand(on: bool) -> None:
    """Switch expandable segments on or off; the cache must be empty."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    settings = f"expandable_segments:{on}"
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(settings)
    else:
        torch.cuda.memory._set_allocator_settings(settings)


# --- steps of small models ----------------------------------------------------------------------------


class Recorder:
    """Records every allocation and free, with the number of the stream, and the peaks of each step."""

    def __init__(self, cpu: bool) -> None:
        """Start recording on the GPU."""
        import torch

        self.cpu, self.torch = cpu, torch
        self.steps: list[dict[str, Any]] = []
        if not cpu:
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=400_000
            )

    def mark(self, name: str) -> None:
        """Store the bytes and peaks since the last mark, then reset the peaks."""
        if self.cpu:
            self.steps.append({"name": name})
            return
        stats = self.torch.cuda.memory_stats_as_nested_dict()
        row: dict[str, Any] = {"name": name}
        for key in ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes"):
            row[key] = stats[key]["all"]["current"]
            row[f"peak_{key}"] = stats[key]["all"]["peak"]
        self.steps.append(row)
        self.torch.cuda.reset_peak_memory_stats()

    def trace(self) -> dict[str, Any]:
        """The allocator's events: action, bytes, stream, address in units of 512 bytes, place in Python."""
        if self.cpu:
            return {}
        snapshot = self.torch.cuda.memory._snapshot()
        self.torch.cuda.memory._record_memory_history(None)
        streams: dict[int, int] = {}
        places: dict[str, int] = {}
        events = []
        actions = {
            "alloc": "a",
            "free_requested": "f",
            "free_completed": "c",
            "segment_alloc": "s",
            "segment_free": "e",
            "segment_map": "m",
            "segment_unmap": "u",
        }
        for event in snapshot["device_traces"][0]:
            stream = streams.setdefault(event.get("stream", 0), len(streams))
            place = places.setdefault(_place(event.get("frames") or ()), len(places))
            action = actions.get(event["action"], event["action"])
            events.append([action, event.get("size", 0), stream, event.get("addr", 0) // 512, place])
        return {"streams": len(streams), "places": list(places), "events": events}


def _place(frames: Any) -> str:
    """The innermost functions of Python that made an allocation."""
    names = [f"{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in frames[:3]]
    return " < ".join(names)


def synchronize(cpu: bool) -> None:
    """Wait for the GPU."""
    import torch

    if not cpu:
        torch.cuda.synchronize()


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Summed cross entropy of logits that are cast to FP32 first."""
    import torch.nn.functional as F  # noqa: N812

    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


def step_of_model(blocks: ModuleType, case: Any, cpu: bool) -> dict[str, Any]:
    """Run a few training steps of one case and return its marks and its trace."""
    import torch

    if not cpu:
        _expand(case.expandable)
    torch.manual_seed(0)
    recorder = Recorder(cpu)
    recorder.mark("start")
    device = "cpu" if cpu else "cuda"
    model = blocks.sharded(case, device)
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    experts = [p for name, p in zip(names, parameters, strict=True) if ".experts." in name]
    dense = [p for name, p in zip(names, parameters, strict=True) if ".experts." not in name]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    recorder.mark("built")
    loss_of = torch.compile(cross_entropy) if case.loss == "compiled" else cross_entropy
    shape = (case.microbatch, case.sequence)
    for step in range(case.steps):
        optimizer.zero_grad()
        data = [torch.randint(case.vocabulary, shape, device=device) for _ in range(2 * case.microbatches)]
        for n in range(case.microbatches):
            last = n == case.microbatches - 1
            if case.microbatches > 1:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                model.set_is_last_backward(last)
            logits = model(data[2 * n])
            loss = loss_of(logits, data[2 * n + 1])
            del logits
            recorder.mark(f"step {step} forward {n}")
            loss.backward()
            recorder.mark(f"step {step} backward {n}")
            del loss
        for group in (dense, experts):
            if group:
                torch.nn.utils.get_total_norm([p.grad for p in group], foreach=True)
        optimizer.step()
        synchronize(cpu)
        recorder.mark(f"step {step} end")
    out = {"case": vars(case), "marks": recorder.steps, **recorder.trace()}
    del model, parameters, dense, experts, optimizer, data
    return out


def split_backward(blocks: ModuleType, case: Any, cpu: bool) -> dict[str, Any]:
    """Bytes that layers keep after their forward, after their input gradients, and after their weights'."""
    import torch
    from torch.distributed.pipelining._backward import (
        stage_backward_input,
        stage_backward_weight,
    )

    device = "cpu" if cpu else "cuda"
    with torch.device(device):
        model = blocks.Model(case)
    layers = torch.nn.ModuleList(blocks.checkpointed(x, case.recompute) for x in model.layers)
    layers.to(torch.bfloat16)
    wave = model.wave
    parameters = list(layers.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    row: dict[str, Any] = {"case": vars(case)}

    def bytes_now() -> int:
        synchronize(cpu)
        return 0 if cpu else torch.cuda.memory_allocated()

    for repeat in range(2):
        x = torch.randn(case.microbatch, case.sequence, case.hidden, device=device, dtype=torch.bfloat16)
        x.requires_grad_()
        before = bytes_now()
        y = x
        for layer in layers:
            y = layer(y, wave)
        row["forward"] = bytes_now() - before
        g = torch.randn_like(y)
        row["gradient"] = g.numel() * g.element_size()
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        grads, groups = stage_backward_input([y], [g], [x], iter(parameters))
        row["input_gradients"] = bytes_now() - before
        row["peak_input_gradients"] = 0 if cpu else torch.cuda.max_memory_allocated() - before
        del y
        row["output_freed"] = bytes_now() - before
        stage_backward_weight(iter(parameters), groups)
        row["weight_gradients"] = bytes_now() - before
        del x, g, grads, groups
        row["end"], row["repeat"] = bytes_now() - before, repeat
    return row


def waiting_logits(cpu: bool, compiled: bool) -> dict[str, Any]:
    """Bytes per logit that a micro-batch keeps while it waits for its backward, by what else is held."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    tokens, hidden, vocabulary = (32, 64, 128) if cpu else (6144, 3072, 64000)
    device = "cpu" if cpu else "cuda"
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    w.grad, x.grad = torch.zeros_like(w), torch.zeros_like(x)
    labels = torch.randint(vocabulary, (1, tokens), device=device)
    loss_of = torch.compile(cross_entropy) if compiled else cross_entropy
    row: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "compiled": compiled}

    def bytes_now(peak: bool = False) -> float:
        synchronize(cpu)
        if cpu:
            return 0.0
        now = torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
        return float((now - before) / (tokens * vocabulary))

    for _ in range(2):
        synchronize(cpu)
        before = 0 if cpu else torch.cuda.memory_allocated()
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        logits = F.linear(x, w)
        loss = loss_of(logits, labels)
        row["forward_peak"], row["kept_with_logits"] = bytes_now(True), bytes_now()
        del logits
        row["kept"] = bytes_now()
        if not cpu:
            torch.cuda.reset_peak_memory_stats()
        loss.backward()
        row["backward_peak"], row["after"] = bytes_now(True), bytes_now()
        del loss
    return row


def cases(blocks: ModuleType) -> list[Any]:
    """The models, most telling first; none has a width of the scored runs."""
    case = blocks.SmallModel
    moe = {"hidden": 2560, "heads": 20, "kv_heads": 20, "ffn": 6912, "experts": 64, "mla": True, "layers": 5}
    return [
        case("dense, op", recompute="op"),
        case("moe, op", recompute="op", **moe),
        case("dense, none"),
        case("dense, full", recompute="full", microbatch=2),
        case("moe, none", **moe),
        case("dense, none, stage of a pipeline", reshard=False, ranks=2, microbatches=3),
        case("dense, op, expandable", recompute="op", expandable=True),
        case("moe, full", recompute="full", **moe),
        case("moe, none, experts sharded", **{**moe, "ep": 4, "experts": 32}),
    ]


@contextlib.contextmanager
def no_peers(ranks: int) -> Iterator[None]:
    """A default process group of `ranks` ranks whose collectives move nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def machine(cpu: bool) -> dict[str, Any]:
    """Hardware, software and command line of the measurement."""
    import torch

    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.total"
    try:
        gpu = subprocess.run(
            ["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=20, check=False
        )
        smi = gpu.stdout
    except OSError:
        smi = "no nvidia-smi"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": smi,
        "date": datetime.now(UTC).isoformat(),
        "command": sys.argv,
        "cpu": cpu,
    }


def main() -> None:
    """Run all parts within the time budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    end = start + options.seconds
    out: dict[str, Any] = {"machine": machine(options.cpu)}
    target = Path(options.out) / "allocator.json"

    def part(name: str, run: Callable[[], Any]) -> None:
        began = time.perf_counter()
        if began > end:
            out[name] = {"skipped": "no time left"}
        else:
            try:
                out[name] = run()
            except Exception:
                out[name] = {"failed": traceback.format_exc()[-1500:]}
        gc.collect()
        state = "failed" if isinstance(out[name], dict) and "failed" in out[name] else "done"
        print(f"{name}: {state} in {time.perf_counter() - began:.1f} s", flush=True)
        if state == "failed":
            print(out[name]["failed"], flush=True)
        target.write_text(json.dumps(out, separators=(",", ":")) + "\n")

    cpu = options.cpu
    sequences = importlib.import_module("lab.studies.allocator_sequences")
    part("sequences", lambda: sequences_part(sequences, cpu, start + 0.35 * options.seconds))
    blocks = importlib.import_module("lab.studies.allocator_blocks")
    for case in cases(blocks):
        chosen = case.small() if cpu else case
        with no_peers(chosen.ranks):
            part(case.name, lambda c=chosen: step_of_model(blocks, c, cpu))  # type: ignore[misc]
    for recompute in ("none", "full"):
        split = blocks.SmallModel(f"split {recompute}", layers=4, recompute=recompute)
        split = split.small() if cpu else split
        part(f"split backward, {recompute}", lambda c=split: split_backward(blocks, c, cpu))  # type: ignore[misc]
    for compiled in (False, True):
        part(f"waiting logits, compiled {compiled}", lambda c=compiled: waiting_logits(cpu, c))  # type: ignore[misc]
    compiled_case = blocks.SmallModel("dense, op, compiled loss", recompute="op", loss="compiled")
    compiled_case = compiled_case.small() if cpu else compiled_case
    with no_peers(compiled_case.ranks):
        part(compiled_case.name, lambda: step_of_model(blocks, compiled_case, cpu))
    out["seconds"] = time.perf_counter() - start
    target.write_text(json.dumps(out, separators=(",", ":")) + "\n")
    print(f"allocator.json: {target.stat().st_size} bytes, {out['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
