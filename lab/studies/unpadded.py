"""GPU time of what flash-attn's `bert_padding` does around each attention: rows by index, back into zeros.

The four calls of v2.4.2 `flash_attn/bert_padding.py` on [tokens, width] in BF16, nothing padded: `torch.gather` and
`scatter_` into zeros of queries, keys and values (IndexFirstAxis), `zeros` and `output[indices] = values`, and
`grad_output[indices]` (IndexPutFirstAxis). Rows begin two bytes off, so that gather runs the kernel by element that
torch 2.1 has, not the one by row of torch 2.8 and later. Inputs are cold in the L2 cache.

Usage: python -m lab.studies.unpadded OUT.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

TOKENS, WIDTHS, REPEATS, COLD_BYTES = (4096, 12288, 16384), (2560, 4096, 8192), 15, 512 << 20


def calls(tokens: int, width: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The calls by name: gather, scatter, put, take."""
    flat = torch.randn(tokens * width + 8, device="cuda").bfloat16()
    x = flat[1 : tokens * width + 1].view(tokens, width)
    rows = torch.nonzero(torch.ones(tokens, dtype=torch.bool, device="cuda")).flatten()
    wide = rows[:, None].expand(-1, width)
    return {
        "gather": lambda: torch.gather(x, 0, wide),
        "scatter": lambda: torch.zeros_like(x).scatter_(0, wide, x),
        "put": lambda: torch.zeros(tokens, width, device="cuda", dtype=x.dtype).index_put_((rows,), x),
        "take": lambda: x[rows],
    }


def main() -> None:
    """Time every call at every size, each result compared with its input."""
    cold = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    found = []
    for width in WIDTHS:
        for tokens in TOKENS:
            for name, run in calls(tokens, width).items():
                times = []
                for _ in range(REPEATS):
                    cold.fill_(1)
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    torch.cuda._sleep(200_000)  # the host is ahead
                    marks[0].record()
                    out = run()
                    marks[1].record()
                    torch.cuda.synchronize()
                    times.append(marks[0].elapsed_time(marks[1]) * 1e-3)
                passes = {"gather": 2, "take": 2, "scatter": 3, "put": 3}[name]
                size = passes * 2.0 * tokens * width
                row = {"call": name, "tokens": tokens, "width": width, "bytes": size}
                row |= {"seconds": statistics.median(times[3:]), "rows": list(out.shape)}
                found.append(row)
                print(json.dumps(row), f"{size / row['seconds'] * 1e-9:.0f} GB/s", flush=True)
    meta = {"date": time.strftime("%Y-%m-%d"), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps({"meta": meta, "rows": found}))


if __name__ == "__main__":
    main()
