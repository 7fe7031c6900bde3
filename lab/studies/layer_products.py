"""GEMMs of a linear layer as Transformer Engine calls them: forward, input gradient, weight gradient.

It calls cuBLASLt through ctypes with the first heuristic and a workspace of 32 MiB, as TransformerEngine v2
does (`transformer_engine/common/gemm/cublaslt_gemm.cu`). FP8 uses one scale per tensor in the one layout that
Hopper has; the forward accumulates fast, both gradients do not (`split_accumulator`); gradients are in E5M2,
and weight gradients add into an FP32 buffer (beta = 1). Inputs are random normal sets beyond the L2 cache.

Usage: python -m lab.studies.layer_products OUT.json [rounds]
"""

from __future__ import annotations

import ctypes as c
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F, SCALE_32F = 68, 0
TRANS_A, TRANS_B, A_SCALE, B_SCALE, FAST_ACCUMULATION = 3, 4, 17, 18, 25
MAX_WORKSPACE = 1
EPILOGUE, BIAS_POINTER, EPILOGUE_BIAS = 7, 8, 4
WORKSPACE_BYTES = 32 << 20
SET_BYTES = 300e6
WARM_S, WINDOW_S = 0.05, 0.10

LAYERS = [  # (n, k) of a weight [n, k], token rows
    ((9216, 12288), (2048, 4096)), ((12288, 3072), (2048, 4096)), ((12288, 12288), (2048, 4096)),
    ((6144, 4096), (2048, 4096, 8192)), ((4096, 4096), (2048, 4096, 8192)),
    ((28672, 4096), (4096, 8192)), ((4096, 14336), (4096, 8192)), ((16384, 4096), (8192,)),
    ((2560, 8192), (2048, 4096, 8192)), ((8192, 2048), (2048, 4096, 8192)),
    ((14336, 8192), (2048, 4096, 8192)), ((8192, 7168), (2048, 4096, 8192)),
    ((2048, 6144), (4096,)), ((6144, 1536), (4096,)), ((65536, 6144), (2048,)), ((6144, 32768), (2048,)),
    ((21504, 7168), (4096, 16384)), ((7168, 28672), (4096, 16384)), ((4096, 7168), (256, 1024, 4096)),
    ((7168, 2048), (256, 1024, 4096)), ((8192, 8192), (256, 1024, 8192)),
]  # fmt: skip


class HeuristicResult(c.Structure):
    """The C structure cublasLtMatmulHeuristicResult_t."""

    _fields_ = [("algo", c.c_uint64 * 8), ("workspace", c.c_size_t), ("state", c.c_int),
                ("waves", c.c_float), ("reserved", c.c_int * 4)]  # fmt: skip


def library() -> c.CDLL:
    """The cuBLASLt that PyTorch has loaded."""
    torch.mm(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
    torch.cuda.synchronize()
    paths = set(re.findall(r"(/\S*libcublasLt\.so[.\d]*)", Path("/proc/self/maps").read_text()))
    return c.CDLL(sorted(paths)[0])


def call(status: int, what: str) -> None:
    """Raise for a status other than success."""
    if status:
        raise RuntimeError(f"{what}: cuBLASLt status {status}")


class Gemm:
    """One GEMM D [m, n] = A^T B or A B, column-major; `beta` 1 adds into D."""

    def __init__(
        self,
        lt: c.CDLL,
        handle: c.c_void_p,
        m: int,
        n: int,
        k: int,
        *,
        a: torch.dtype,
        b: torch.dtype,
        d: torch.dtype,
        trans: tuple[bool, bool],
        beta: float,
        fast: bool,
        workspace: int = WORKSPACE_BYTES,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Describe the GEMM, with a bias [m] of D's format if given, and take the first heuristic."""
        self.lt, self.handle = lt, handle
        self.alpha, self.beta = c.c_float(1.0), c.c_float(beta)
        self.desc = c.c_void_p()
        call(lt.cublasLtMatmulDescCreate(c.byref(self.desc), COMPUTE_32F, SCALE_32F), "desc")
        self.scales = [torch.ones(1, device="cuda") for _ in range(2)]
        self.bias = bias
        self._set(TRANS_A, c.c_int32(int(trans[0])))
        self._set(TRANS_B, c.c_int32(int(trans[1])))
        if bias is not None:
            self._set(EPILOGUE, c.c_int32(EPILOGUE_BIAS))
            self._set(BIAS_POINTER, c.c_void_p(bias.data_ptr()))
        if a.itemsize == 1:
            self._set(A_SCALE, c.c_void_p(self.scales[0].data_ptr()))
            self._set(B_SCALE, c.c_void_p(self.scales[1].data_ptr()))
            self._set(FAST_ACCUMULATION, c.c_int8(int(fast)))
        rows_a, cols_a = (k, m) if trans[0] else (m, k)
        rows_b, cols_b = (n, k) if trans[1] else (k, n)
        self.a, self.b = self._layout(a, rows_a, cols_a), self._layout(b, rows_b, cols_b)
        self.d = self._layout(d, m, n)
        preference, size = c.c_void_p(), c.c_uint64(workspace)
        call(lt.cublasLtMatmulPreferenceCreate(c.byref(preference)), "preference")
        limit = (preference, MAX_WORKSPACE, c.byref(size), c.c_size_t(8))
        call(lt.cublasLtMatmulPreferenceSetAttribute(*limit), "workspace")
        self.found, count = HeuristicResult(), c.c_int()
        call(
            lt.cublasLtMatmulAlgoGetHeuristic(
                handle, self.desc, self.a, self.b, self.d, self.d, preference, 1, c.byref(self.found),
                c.byref(count)
            ),
            "heuristic",
        )  # fmt: skip
        if not count.value:
            raise RuntimeError("no algorithm")
        self.workspace = torch.empty(workspace, dtype=torch.uint8, device="cuda")

    def _set(self, attribute: int, value: Any) -> None:
        status = self.lt.cublasLtMatmulDescSetAttribute(
            self.desc, attribute, c.byref(value), c.c_size_t(c.sizeof(value))
        )
        call(status, f"attribute {attribute}")

    def _layout(self, dtype: torch.dtype, rows: int, cols: int) -> c.c_void_p:
        layout = c.c_void_p()
        status = self.lt.cublasLtMatrixLayoutCreate(
            c.byref(layout), TYPES[dtype], c.c_uint64(rows), c.c_uint64(cols), c.c_int64(rows)
        )
        call(status, "layout")
        return layout

    def run(self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
        """Queue the GEMM on the current stream."""
        stream = c.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = [c.c_void_p(t.data_ptr()) for t in (a, b, d, self.workspace)]
        call(
            self.lt.cublasLtMatmul(
                self.handle, self.desc, c.byref(self.alpha), pointers[0], self.a, pointers[1], self.b,
                c.byref(self.beta), pointers[2], self.d, pointers[2], self.d, c.byref(self.found.algo),
                pointers[3], c.c_size_t(self.workspace.numel()), stream
            ),
            "matmul",
        )  # fmt: skip


def normal(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Random normal numbers, row-major [rows, cols]."""
    return torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16).to(dtype)


def case(lt: c.CDLL, handle: c.c_void_p, kind: str, dtype: str, n: int, k: int, t: int) -> dict[str, Any]:
    """The GEMM y[t, n] = x[t, k] W[n, k]^T or one of its gradients, ready to time."""
    low, wide = torch.float8_e4m3fn, torch.float8_e5m2
    fp8 = dtype == "fp8"
    first, second = (low, low if kind == "forward" else wide) if fp8 else (torch.bfloat16,) * 2
    out = torch.float32 if kind == "wgrad" else torch.bfloat16
    m, cols, inner = {"forward": (n, t, k), "dgrad": (k, t, n), "wgrad": (k, n, t)}[kind]
    # Row-major x [t, k] is column-major [k, t]; FP8 needs both operands with the inner side first.
    trans = {"forward": (True, False), "dgrad": (False, False), "wgrad": (False, True)}[kind]
    trans = (True, False) if fp8 else trans
    beta = 1.0 if kind == "wgrad" else 0.0
    gemm = Gemm(lt, handle, m, cols, inner, a=first, b=second, d=out, trans=trans, beta=beta,
                      fast=kind == "forward")  # fmt: skip
    moved = m * inner * first.itemsize + cols * inner * second.itemsize + m * cols * out.itemsize
    sets = max(2, -(-int(SET_BYTES) // moved))
    shape_a = (m, inner) if trans[0] else (inner, m)
    shape_b = (inner, cols) if trans[1] else (cols, inner)
    data = [
        (
            normal(*shape_a, first),
            normal(*shape_b, second),
            torch.zeros(cols, m, device="cuda", dtype=out),
        )
        for _ in range(sets)
    ]
    gemm.run(*data[0])
    a, b, d = (x.float() for x in data[0])
    a, b = (a if trans[0] else a.t()), (b.t() if trans[1] else b)
    want = b[:64] @ a.t()
    error = float((d[:64] - want).norm() / want.norm())
    return {"kind": kind, "dtype": dtype, "n": n, "k": k, "tokens": t, "error": error, "product": gemm,
            "data": data, "flop": 2.0 * m * cols * inner, "waves": float(gemm.found.waves)}  # fmt: skip


def seconds(one: dict[str, Any]) -> float:
    """Seconds per GEMM in a window of WINDOW_S between two events, after a warm-up of WARM_S."""
    gemm, data = one["product"], one["data"]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    guess = one["flop"] / (800e12 if one["dtype"] == "fp8" else 500e12)
    warm, calls = (max(len(data), round(s / guess)) for s in (WARM_S, WINDOW_S))
    for i in range(warm):
        gemm.run(*data[i % len(data)])
    marks[0].record()
    for i in range(calls):
        gemm.run(*data[i % len(data)])
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) * 1e-3 / calls


def main() -> None:
    """Measure every layer, kind and format in rounds, and write the rows after each round."""
    out, rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    torch.manual_seed(1)
    lt, handle = library(), c.c_void_p()
    call(lt.cublasLtCreate(c.byref(handle)), "create")
    lt.cublasLtGetVersion.restype = c.c_size_t
    query = "--query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu"
    log = out.with_suffix(".samples.csv").open("w")
    sampler = subprocess.Popen(["nvidia-smi", query, "--format=csv,noheader", "-lms", "500"], stdout=log)
    keys = [
        (kind, dtype, n, k, t)
        for (n, k), tokens in LAYERS
        for t in tokens
        for dtype in ("fp8", "bf16")
        for kind in ("forward", "dgrad", "wgrad")
    ]
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    began = time.monotonic()
    for number in range(rounds):
        for key in keys:
            try:
                one = case(lt, handle, *key)
                took = seconds(one)
            except RuntimeError as error:
                rows.setdefault(key, {"failed": str(error)})
                continue
            row = rows.setdefault(key, {x: one[x] for x in one if x not in ("product", "data")} | {"us": []})
            row["us"].append(round(took * 1e6, 3))
            row["tflop_per_s"] = round(row["flop"] / statistics.median(row["us"]) * 1e-6, 1)
            del one
        meta = {
            "date": time.strftime("%Y-%m-%d"),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cublaslt": int(lt.cublasLtGetVersion()),
            "command": "python -m lab.studies.layer_products OUT.json",
            "rounds": number + 1,
        }
        names = ("kind", "dtype", "n", "k", "tokens")
        table = [dict(zip(names, key, strict=True)) | row for key, row in rows.items()]
        out.write_text(json.dumps({"meta": meta, "rows": table}))
        print(f"round {number + 1}: {time.monotonic() - began:.0f} s", flush=True)
    sampler.terminate()
    for row in table:
        said = row.get("failed") or f"{row['tflop_per_s']} TFLOP/s, error {row['error']:.4f}"
        print(row["kind"], row["dtype"], row["n"], row["k"], row["tokens"], said)


if __name__ == "__main__":
    main()
