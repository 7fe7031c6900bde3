"""Peak bytes per BF16 logit of a cross-entropy in FP32, forward and backward, on one GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812


def measure(tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """Bytes above those allocated before the head, per element of the logits."""
    h = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
    n = tokens * vocabulary
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = F.linear(h, w)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels)
    forward, kept = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del logits
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - before
    return {
        "tokens": tokens,
        "vocabulary": vocabulary,
        "hidden": hidden,
        "forward_peak": forward / n,
        "kept": kept / n,
        "backward_peak": backward / n,
        "weight_and_input_gradient": 2 * (w.numel() + h.numel()) / n,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=".")
    out = Path(parser.parse_args().out)
    rows = [measure(8192, 102400, 2048), measure(4096, 129280, 7168), measure(8192, 128256, 4096)]
    (out / "loss_memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))
