"""Scores the laws of serving operators and of the exchange on public tables, by shapes left out.

A case is one row of a table with the operators that its benchmark ran. Every second shape (expert-parallel
size, batch, number of tokens) of a family calibrated the shipped laws; the others are the score.
"""

from __future__ import annotations

import csv
import gzip
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from moesim.hwmodels.accelerator import load_accelerator
from moesim.hwmodels.calibration import load_profile
from moesim.hwmodels.cluster import load_cluster
from moesim.simulator.dispatchers.protocol import EpOperation
from moesim.simulator.layout.routing import Gate
from moesim.simulator.model.attention.dsa import DSA
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.protocol import Attention
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.operator import Operator
from moesim.simulator.model.precision import Format
from moesim.simulator.model.primitives import BF16, move, norm
from moesim.simulator.serving.attention import attention_operators, core
from moesim.simulator.serving.exchange import Fabric, expert_exchange
from moesim.simulator.serving.linear import product
from moesim.simulator.serving.operators import ExpertLoad, Split, StepRows, experts, hyper, router
from moesim.simulator.serving.prices import eager_seconds, price

Row = dict[str, str]


class Case(NamedTuple):
    """A measured time with the operators behind it.

    `shape`: the sizes that say which cases are left out; `eager`: name of the host time that bounds a module
    run without a graph, if any; `given_s`: seconds of a call of the exchange, which has no operators.
    """

    family: str
    card: str
    shape: tuple[float, ...]
    operators: tuple[Operator, ...]
    seconds: float
    eager: str = ""
    given_s: float | None = None

    @property
    def left_out(self) -> bool:
        """Whether the shipped laws never saw it: every second size, numbered by the power of two."""
        return round(sum(math.log2(max(size, 1.0)) for size in self.shape)) % 2 == 1

    @property
    def predicted_s(self) -> float:
        """Seconds by the shipped laws."""
        if self.given_s is not None:
            return self.given_s
        card = load_accelerator(self.card)
        device = sum(price(op, card).seconds for op in self.operators)
        return eager_seconds(self.eager, device) if self.eager else device


def conditions(row: Row) -> dict[str, str]:
    """The `key=value` parts of a row's conditions."""
    return dict(part.split("=", 1) for part in row["conditions"].split("; ") if "=" in part)


# -- experts and latent attention (aiconfigurator, H200) ---------------------------------------------

BLOCK = 128.0
"""Rows of a block of DeepGEMM's contiguous kernels; engines pad an expert's rows to it."""


def expert_case(row: Row, moe: MoE) -> Case:
    """DeepEPMoE's experts: masked in decode (in a graph), contiguous in prefill (eager).

    `num_tokens` are those of all ranks. In prefill the benchmark hands all of them to the one rank, and its
    uniform rows are not padded, so that a block holds rows of several experts.
    """
    c, decode = conditions(row), row["phase"].startswith("decode")
    tokens, ep = float(c["num_tokens"]), int(c["ep"])
    split = Split(ep=ep, weights="fp8", experts="fp8", kernels="deepgemm")
    if c["distribution"] == "uniform":
        rows = tokens * moe.top_k / ep
        blocks = math.ceil(rows / BLOCK) if not decode else rows
        load = ExpertLoad(tokens, rows, min(moe.experts / ep, blocks), tokens)
    else:
        load = ExpertLoad.of(moe, split, tokens, alpha=float(c["distribution"].rpartition("_")[2]))._replace(
            received=tokens
        )
        if not decode:
            load = load._replace(rows=load.rows + load.active * BLOCK / 2)
    ops = tuple(experts(moe, 7168, load, split, decode))
    kind = "decode" if decode else "prefill"
    name = f"experts {kind}, {c['distribution'].partition('_0')[0].partition('_1')[0]}"
    return Case(name, "h200-sxm", (float(ep),), ops, float(row["value"]) * 1e-3, "" if decode else "experts")


def latent_case(row: Row, mla: MLA) -> Case:
    """SGLang's MLA block: decodes in a graph, prefills eager.

    The benchmark replaces the down-projection by random numbers, and its cache is BF16 (`kv_cache_dtype` is
    not set in `collector/sglang/collect_wideep_attn.py`).
    """
    c, decode = conditions(row), row["phase"].startswith("decode")
    batch, length, heads = float(c["batch"]), float(c["isl_or_kv"]), int(c["heads"])
    attention = mla.model_copy(update={"heads": heads})
    split = Split(weights="fp8")
    t = batch if decode else batch * length
    rows = (
        StepRows(t, t, 0.0, t, batch * (length + 1), 0.0) if decode
        else StepRows(t, 0.0, t, batch, 0.0, t * (length + 1) / 2, 1.0, batch, t)
    )  # fmt: skip
    ops = [
        op for op in attention_operators(attention, 7168, rows, split) if not op.name.startswith("qkv_down")
    ]
    drawn = move("random", "elementwise", "F", 0.0, t * 2112 * BF16, variant="random")
    backend = "flashinfer" if "flashinfer" in row["system"] else "fa3"
    name = f"MLA {'decode' if decode else 'prefill'}, {backend}"
    return Case(
        name, "h200-sxm", (batch,), (drawn, *ops), float(row["value"]) * 1e-3, "" if decode else "mla"
    )


def experts_and_mla(rows: Iterable[Row]) -> Iterator[Case]:
    """Cases of `experts-and-mla-open.csv`."""
    shape = load_model("deepseek-v3")
    mla = shape.layers[-1].attention
    assert shape.moe is not None and isinstance(mla, MLA)
    for row in rows:
        yield expert_case(row, shape.moe) if "DeepEPMoE" in row["system"] else latent_case(row, mla)


# -- sparse attention and hyper-connections (aiconfigurator, H200) -----------------------------------

MODELS = {"DeepSeek-V3.2": "deepseek-v3.2", "GLM-5": "glm-5", "GLM-5-FP8": "glm-5", "GLM-5.2-FP8": "glm-5.2",
          "DeepSeek-V4-Pro-FP8": "deepseek-v4-pro"}  # fmt: skip


def sparse_case(row: Row) -> Case:
    """A module of sparse or compressed attention: SGLang's in a graph, vLLM's prefills eager."""
    c = conditions(row)
    name = row["conditions"].partition(";")[0]
    if name.startswith("mhc"):
        return _hyper_case(row, name, c)
    shape = load_model(MODELS[row["model"].rpartition("/")[2]])
    engine = "vllm" if row["system"].startswith("VLLM") else "sglang"
    batch, isl, past = (float(c[key]) for key in ("batch", "isl", "past_kv"))
    attention = next(layer.attention for layer in shape.layers if _is(layer.attention, name))
    split = Split(weights="fp8", cache="bf16" if c["kv"] == "bfloat16" else "fp8", engine=engine)
    t = batch * isl
    decode = "generation" in name or (isl == 1.0 and "dsv4" in name)
    rows = (
        StepRows(t, t, 0.0, t, batch * (past + 1), 0.0) if decode
        else StepRows(t, 0.0, t, batch, 0.0, t * (past + (isl + 1) / 2), 1.0, batch, batch * (past + isl))
    )  # fmt: skip
    ops = attention_operators(attention, shape.hidden, rows, split)
    kind = name.split("_")[1] if "dsv4" in name else "DSA"
    family = f"{kind} {'decode' if decode else 'prefill'}, {engine}"
    if not decode and "skip_indexer" in row["system"]:
        family += ", shared choice"
    eager = "dsa" if engine == "vllm" and not decode else ""
    return Case(family, "h200-sxm", (batch, isl, past), tuple(ops), float(row["value"]) * 1e-3, eager)


def _is(attention: Attention, name: str) -> bool:
    if isinstance(attention, DSA):
        return attention.indexer.shared == name.endswith("skip_indexer")
    indexer = getattr(attention, "indexer", None)
    return getattr(attention, "ratio", 0) > 0 and (indexer is not None) == ("csa" in name)


def _hyper_case(row: Row, name: str, c: Row) -> Case:
    t, hidden, sites = float(c["tokens"]), int(c["hidden"]), int(c["sites"])
    mix, spread = hyper(hidden, t, int(c["hc_mult"]), "attn")
    ops = (mix if name.endswith("pre") else spread) * sites
    family = f"hyper-connections, {name.partition(' ')[2]}"
    return Case(family, "h200-sxm", (t,), tuple(ops), float(row["value"]) * 1e-3)


# -- kernels of the H800 -----------------------------------------------------------------------------


def h800_kernels(folder: Path) -> Iterator[Case]:
    """Cases of `facts/h800-kernels`: DeepGEMM, FlashMLA and FlashAttention 3, by alibaba/InferSim@f2293da."""
    card = "h800-sxm"
    for row in _csv(folder / "gemm-data.csv"):
        m, k, n = (float(row[key]) for key in ("m", "k", "n"))
        ops = (product("product", m, n, k, "fp8"),)
        yield Case("GEMM FP8", card, (m,), ops, float(row["latency_us"]) * 1e-6)
    for phase in ("decode", "prefill"):
        for row in _csv(folder / f"grouped_gemm-{phase}-data.csv"):
            groups, m = int(row["num_local_experts"]), float(row["tokens_per_expert"])
            if groups == 256 and m == 1.0:
                continue  # half of the experts have no row
            variant = f"{'masked' if phase == 'decode' else 'contiguous'}-fp8"
            for name, n, k in (("up", 4096.0, 7168.0), ("down", 7168.0, 2048.0)):
                op = product(
                    name, m * groups, n, k, "fp8", cls="grouped_gemm", groups=groups, variant=variant
                )
                seconds = float(row[f"{name}_proj_us"]) * 1e-6
                yield Case(f"grouped GEMM FP8, {variant[:-4]}", card, (m, groups), (op,), seconds)
    for row in _csv(folder / "mla-decode-128-512-64.csv"):
        batch, keys = float(row["batch_size"]), float(row["kv_len"])
        op = core("decode", "decode-mla", batch, batch * keys, (576.0, 512.0), batch * keys * 1152.0, 128.0)
        yield Case("MLA decode kernel", card, (batch, keys), (op,), float(row["latency_us"]) * 1e-6)
    for row in _csv(folder / "mla-prefill-128-128-64.csv"):
        n = float(row["seq_len"])
        op = core("prefill", "prefill-mla", n, n * (n + 1) / 2, (192.0, 128.0), n * 128 * 320 * BF16, 128.0)
        yield Case("MLA prefill kernel", card, (n,), (op,), float(row["latency_us"]) * 1e-6)


OPERATORS = {
    "Phi-tiny-MoE-instruct": (256, 0),
    "Qwen3-30B-A3B-tiny": (128, 1),
    "qwen3-next-80b-a3b-instruct-reduced-l2": (256, 1),
}
"""Elements of a head, and whether queries and keys are normed, of the models of `h800-operators`."""


def h800_operators(folder: Path) -> Iterator[Case]:
    """Cases of `serving/h800-operators`: vLLM's kernels at small shapes, by NetX-lab/Frontier@a4b22df."""
    for model, (head_dim, normed) in OPERATORS.items():
        yield from _linears(_csv(folder / model / "linear_op_kernel_only.csv.gz"), head_dim, bool(normed))
        yield from _attentions(_csv(folder / model / "attention_kernel_only.csv.gz"), head_dim)
        yield from _fused(_csv(folder / model / "moe_kernel_only.csv.gz"))


def _time(row: Row, name: str) -> float:
    return float(row.get(f"time_stats.{name}.median") or 0.0) * 1e-3


def _linears(rows: list[Row], head_dim: int, normed: bool) -> Iterator[Case]:
    for row in rows:
        t, tp, hidden = float(row["num_tokens"]), int(row["num_tensor_parallel_workers"]), int(row["n_embd"])
        heads, kv = int(row["n_head"]) / tp, max(int(row["n_kv_head"]) / tp, 1.0)
        width = (heads + 2 * kv) * head_dim
        made: dict[str, Operator] = {
            "attn_post_proj": product("o_proj", t, hidden, heads * head_dim, "bf16"),
            "input_layernorm": norm("norm", "F", t, hidden, residual=True),
            "post_attention_layernorm": norm("norm", "F", t, hidden, residual=True),
            "attn_rope": move("rope_and_cache", "rope", "F", t * width * BF16, t * width * BF16),
        }
        if not normed:
            made["attn_pre_proj"] = product("qkv_proj", t, width, hidden, "bf16")
        if shared := float(row.get("share_expert_dim") or 0.0) / tp:
            made["share_expert_up_proj"] = product("up", t, 2 * shared, hidden, "bf16")
            made["share_expert_down_proj"] = product("down", t, hidden, shared, "bf16")
            made["share_expert_act"] = move("act", "swiglu", "F", t * 2 * shared * BF16, t * shared * BF16)
        for name, op in made.items():
            family = "GEMM BF16, few rows" if op.gemm else "small kernels"
            if seconds := _time(row, name):
                yield Case(family, "h800-sxm", (t,), (op,), seconds)


def _attentions(rows: list[Row], head_dim: int) -> Iterator[Case]:
    for row in rows:
        if row["mode"] != "even":
            continue
        tp, batch = int(row["num_tensor_parallel_workers"]), float(row["batch_size"])
        heads, kv = int(row["n_q_head"]) / tp, max(int(row["n_kv_head"]) / tp, 1.0)
        chunk, past, dims = (
            float(row["prefill_chunk_size"] or 0),
            float(row["kv_cache_size"]),
            (head_dim, head_dim),
        )
        size = 2 * kv * head_dim * BF16
        if row["is_prefill"] == "True":
            t = batch * chunk
            op = core(
                "prefill",
                "prefill-gqa",
                t,
                t * (past + (chunk + 1) / 2),
                dims,
                batch * (past + chunk) * size,
                heads,
            )
            yield Case(
                "attention prefill, few keys", "h800-sxm", (batch, chunk), (op,), _time(row, "attn_prefill")
            )
        else:
            op = core(
                "decode", "decode-gqa", batch, batch * (past + 1), dims, batch * (past + 1) * size, heads
            )
            yield Case(
                "attention decode, few keys", "h800-sxm", (batch, past), (op,), _time(row, "attn_decode")
            )


def _fused(rows: list[Row]) -> Iterator[Case]:
    for row in rows:
        t, tp = float(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
        local, routed = float(row["num_experts_per_device"]), float(row["total_routed_tokens"])
        if not routed:
            continue
        moe = MoE(
            experts=int(row["num_experts"]), top_k=int(row["router_topk"]),
            expert_ffn=int(row["expert_hidden_dim"]), scoring="softmax",
        )  # fmt: skip
        hidden = int(row["hidden_dim"])
        load = ExpertLoad(t, routed, float(row["expert_utilization"]) * local, t)
        ops = experts(moe, hidden, load, Split(expert_tp=tp), decode=True)
        seconds = _time(row, "moe_grouped_gemm")
        yield Case("fused experts BF16, vLLM", "h800-sxm", (t,), tuple(ops[1:]), seconds)
        gate = router(moe, hidden, t)[0]
        yield Case("GEMM BF16, few rows", "h800-sxm", (t,), (gate,), _time(row, "moe_gating_linear"))


# -- exchange ----------------------------------------------------------------------------------------


def exchange_cases(rows: Iterable[Row]) -> Iterator[Case]:
    """Cases of `deepep-kernels-open.csv`; calls of normal kernels without their exchange of counts.

    The tables do not say in which format normal kernels dispatch: the bytes fit FP8 in a node, BF16 across.
    """
    moe = load_model("deepseek-v3").moe
    assert moe is not None
    fabrics = {
        card: Fabric(load_cluster(f"{card}-1024"), load_profile(f"{card}-measured"))
        for card in ("h100", "h200")
    }
    for row in rows:
        c, card = conditions(row), row["hardware"][:4].lower()
        nodes, tokens, name = int(c["nodes"]), float(c["tokens/rank"]), row["metric"].partition("_")[0]
        low = " ll" in row["conditions"][:10]
        operation: EpOperation = "dispatch" if name == "dispatch" else "combine"
        wire: Format = "bf16" if operation == "combine" or (nodes > 1 and not low) else "fp8"
        one = expert_exchange(
            fabrics[card], moe, int(c["hidden"]), 8 * nodes, tokens, operation, low_latency=low,
            sms=int(c.get("sms", 0)), wire=wire,
            gate=Gate(256, 8, 1, 1, None) if nodes == 1 else None,  # the test across nodes has 4
        )  # fmt: skip
        seconds = one.seconds
        if not low and nodes > 1:
            seconds -= NOTIFIED_S[operation]
        family = f"{operation} {'low latency' if low else 'normal'}, {nodes} nodes"
        yield Case(family, f"{card}-sxm", (tokens,), (), float(row["value"]) * 1e-6, given_s=seconds)


NOTIFIED_S = {"dispatch": 75e-6, "combine": 85e-6}
"""Exchange of counts in the law of calls between nodes, which the tables list apart."""


def all_cases(shared: Path) -> list[Case]:
    """Cases of all tables under a folder with `validation/serving` and `facts`."""
    serving = shared / "validation" / "serving"
    return [
        *experts_and_mla(_csv(serving / "experts-and-mla-open.csv")),
        *(sparse_case(row) for row in _csv(serving / "sparse-attention-open.csv")),
        *h800_kernels(shared / "facts" / "h800-kernels"),
        *h800_operators(serving / "h800-operators"),
        *exchange_cases(_csv(serving / "deepep-kernels-open.csv")),
    ]


def _csv(path: Path) -> list[Row]:
    opened: Callable[..., object] = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:  # type: ignore[attr-defined]
        return list(csv.DictReader(file))


# -- the score ---------------------------------------------------------------------------------------


class FamilyScore(NamedTuple):
    """Relative errors of a family: over the shapes that calibrated, and over those left out."""

    family: str
    fitted: int
    fitted_median: float
    left_out: int
    left_out_median: float
    left_out_p90: float


def scores(cases: Iterable[Case]) -> tuple[FamilyScore, ...]:
    """Errors by family, and of all together at the end."""
    errors: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for case in cases:
        error = abs(case.predicted_s / case.seconds - 1.0)
        for name in (case.family, "all"):
            errors[name][case.left_out].append(error)
    order = sorted(errors, key=lambda name: (name == "all", name))
    return tuple(
        FamilyScore(
            name, len(seen), statistics.median(seen) if seen else math.nan, len(out),
            statistics.median(out) if out else math.nan,
            sorted(out)[int(0.9 * len(out))] if out else math.nan,
        )
        for name in order
        for seen, out in (errors[name],)
    )  # fmt: skip
