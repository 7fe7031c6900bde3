"""What a forward keeps for its backward, as PyTorch's allocator counts it: bytes and sizes of blocks."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def kept_bytes(
    device: str, forward: Callable[[], torch.Tensor], clear: Callable[[], None], largest: int = 40
) -> dict[str, Any]:
    """Bytes that are allocated after a forward and were not before it, and their blocks by size.

    The forward and its backward must have run before, so that buffers that stay are there. `requested` is
    what PyTorch asked for, `allocated` what the allocator rounded it to, `peak` the most that was allocated
    during the backward, gradients included, all over what there was before the forward. `blocks`: requested
    sizes in bytes and how many more of them there are, the `largest` first. On a CPU all are those of live
    tensors that Python sees.
    """
    clear()
    gc.collect()
    before = _blocks(device)
    start = sum(size * n for (_, size), n in before.items())
    output = forward()
    after = _blocks(device)
    more = after - before
    requested: Counter[int] = Counter()
    for (asked, _), n in more.items():
        requested[asked] += n
    out: dict[str, Any] = {
        "requested": sum(asked * n for (asked, _), n in more.items()),
        "allocated": sum(size * n for (_, size), n in after.items()) - start,
        "blocks": {str(size): requested[size] for size in sorted(requested, reverse=True)[:largest]},
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    output.backward(torch.ones_like(output))
    if device == "cuda":
        out["peak"] = torch.cuda.max_memory_allocated() - start
    del output
    clear()
    return out


def _blocks(device: str) -> Counter[tuple[int, int]]:
    """Live blocks by requested and allocated bytes."""
    if device == "cuda":
        torch.cuda.synchronize()
        live = [
            (block["requested_size"], block["size"])
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        return Counter(live)
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            with suppress(RuntimeError):  # a storage of a tensor without data
                storages[storage.data_ptr()] = (storage.nbytes(), storage.nbytes())
    return Counter(storages.values())


def slope(low: dict[str, Any], high: dict[str, Any], span: int, tokens: int) -> dict[str, Any]:
    """Bytes that one layer keeps for a token, from models whose depths are `span` apart."""
    out: dict[str, Any] = {
        f"{name}_bytes_per_token": (high[name] - low[name]) / span / tokens
        for name in ("requested", "allocated")
    }
    sizes = sorted(set(map(int, high["blocks"])) | set(map(int, low["blocks"])), reverse=True)
    counts = {size: (high["blocks"].get(str(size), 0) - low["blocks"].get(str(size), 0)) for size in sizes}
    out["blocks_per_layer"] = {str(size): n / span for size, n in counts.items() if n}
    return out
