"""Measures casts between BF16 and E4M3 with 1x128 scales, as communication kernels do them, over SMs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesim.kernels.calibrate.protocol import Facts, Grid, Parameter, Sample

COLUMNS = 7168
ROWS = 32768
"""Rows of the input, which is 470 MB of BF16 and eight times the L2 cache."""


def _grid(facts: Facts, quick: bool) -> Sequence[Mapping[str, Parameter]]:
    ctas = (4, 20, 4 * facts.sms) if quick else (1, 2, 4, 8, 16, 20, 24, 32, 64, facts.sms, 4 * facts.sms)
    tasks: list[dict[str, Parameter]] = [
        {"operation": o, "ctas": n, "rows": ROWS} for o in ("quantise", "dequantise") for n in ctas
    ]
    if not quick:
        tasks += [{"operation": "quantise", "ctas": 4 * facts.sms, "rows": rows} for rows in (1024, 4096)]
    return tasks


def _on_gpu(session: Any, p: Mapping[str, Any]) -> Sample:
    from moesim.kernels.catalog import KERNELS
    from moesim.kernels.loader import cupy
    from moesim.kernels.quantization import dequantize, quantize

    cp, group, rows = cupy(), session.group(1), p["rows"]

    def build() -> list[tuple[Any, Any, Any]]:
        made = []
        for _ in range(session.sets(3 * rows * COLUMNS)):
            with cp.cuda.Device(session.devices[0]):
                x = cp.random.randint(0x3000, 0x4000, size=(rows, COLUMNS), dtype=cp.uint16)
                q = cp.empty((rows, COLUMNS), dtype=cp.uint8)
                scales = cp.empty((rows, COLUMNS // 128), dtype=cp.float32)
                cp.cuda.Device().synchronize()
            quantize(group, 0, x, q, scales, 132)
            made.append((x, q, scales))
        group.synchronize()
        return made

    data = session.keep(("quantise", rows), build)

    def work(i: int) -> None:
        x, q, scales = data[i % len(data)]
        if p["operation"] == "quantise":
            quantize(group, 0, x, q, scales, p["ctas"])
        else:
            dequantize(group, 0, q, scales, x, p["ctas"])

    name = "quantize" if p["operation"] == "quantise" else "dequantize"
    moved = sum(KERNELS[name].moved_bytes({"rows": rows, "columns": COLUMNS}))
    return Sample(session.time(1, work), {"bytes": float(moved)})


MEASUREMENT = Grid(
    name="quantise",
    title="casts between BF16 and FP8",
    grid=_grid,
    on_gpu=_on_gpu,
    task_s=0.2,
    setup_s=2.0,
)
