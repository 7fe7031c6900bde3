"""The operators of a step as a table of plain sizes, which `moesim calibrate` measures one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moesim.hwmodels.cluster import list_clusters, load_cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.cost.data_parallel import gather_copies
from moesim.simulator.cost.end_of_step import update_operators
from moesim.simulator.cost.rate_tables import ATTENTION_CLASSES, operator_bytes
from moesim.simulator.frameworks.eager import (
    CAT,
    CAT_ROWS,
    GROUPED_MM,
    HALVES,
    INDEX_BYTES,
    PADDING,
    ROW_BYTES,
)
from moesim.simulator.memory.gpu import chunks_by_rank
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.softmax import SoftmaxAttention
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.feed_forward.moe import MoE
from moesim.simulator.model.operator import GEMM_CLASSES, Operator
from moesim.simulator.model.primitives import BF16
from moesim.simulator.predict.step import PreparedPool, prepare
from moesim.simulator.scenario import Scenario, load_scenario, preset_names

ELEMENT_BYTES = {
    "norm/eager_forward": 4.0,
    "norm/eager_forward_add": 8.0,
    "norm/eager_backward": 6.0,
    "norm/eager_head_forward": 4.0,
    "norm/eager_head_backward": 6.0,
    "rope/eager": 20.0,
    "rope/eager_halves": sum(HALVES.forward),
    "rope/eager_halves_backward": sum(HALVES.backward),
    "swiglu/eager_forward": 10.0,
    "swiglu/eager_backward": 18.0,
    "topk/eager_forward": 48.0,
    "topk/eager_backward": 64.0,
    "elementwise/add": 6.0,
    "elementwise/scale": 4.0,
    "copy/widen": 6.0,
    "copy/narrow": 6.0,
    "copy/pack": 6.0,
    "copy/flat": 4.0,
    "copy/eager_cat": 4.0,
    "copy/eager_cat_rows": 4.0,
    "copy/gather_in": 6.0,
    "copy/add_widened": 10.0,
    "loss/eager_forward": 12.0,
    "loss/eager_backward": 16.0,
    "elementwise/tiny": 8.0,
    "elementwise/positions": 16.0,
    "permute/count": 8.0,
    f"permute/{PADDING}": INDEX_BYTES,
    "optimizer/norm": 4.0,
    "optimizer/adamw": 28.0,
    "optimizer/update": 8.0,
    **{f"permute/eager_{name.removeprefix('experts.')}": size for name, size in ROW_BYTES.items()},
}
"""Bytes that an operator of this use is counted to move for one element of its tensor; a test compares them
with the operators themselves."""
COMPILED_BYTES = {
    "norm/forward": 4.0,
    "norm/forward_add": 8.0,
    "norm/backward": 6.0,
    "rope/": 4.0,
    "swiglu/forward": 6.0,
    "swiglu/backward": 10.0,
    "swiglu/weighted_backward": 12.0,
    "swiglu/weight_backward": 4.0,
    "topk/forward": 48.0,
    "topk/backward": 64.0,
    "loss/forward": 16.0,
    "loss/backward": 8.0,
}
"""The same of operators that stand for compiled code, where `software` says so."""
COMPILED = (
    "software.kernels=fused",
    "software.compiled_blocks=true",
    "software.loss=compiled",
    "software.allocator=none",
)
"""What `compile.enable` of torchtitan changes."""
PIECES = {
    "fsdp.copy_out": "copy_out",
    "k_nope_pack": "strided",
    "k_nope_unpack": "strided",
    "v_unpack": "strided",
}
"""Code of operators whose use does not say it, by name."""
STEP_ELEMENTS = (2**24, 2**27, 2**29)
"""Parameters of one GPU at which the kernels at the end of a step are measured."""
LENGTH = 4096
"""Tokens of a sequence, and of a micro-batch, where the user names a model alone."""
Shape = dict[str, Any]
"""`use`, `bytes`, `launches`, and the sizes of its tensors where a piece of code stands for the operator."""


def operators_of(what: str, accelerator: str, quick: bool) -> tuple[Shape, ...]:
    """Operators of a scenario (a preset or a file with a cluster) or of a model as torchtitan trains it.

    Where these are PyTorch's eager ones, those of the same step compiled follow.
    A model is planned with FSDP2 and expert parallelism inside a node, on a shipped cluster of the
    accelerator. Every operator appears at several numbers of tokens. Raises InputError for an unknown name,
    a malformed file, or an accelerator that no shipped cluster has.
    """
    if what in preset_names() or _is_scenario(what):
        scenario = load_scenario(what)
    else:
        cluster = next((n for n in list_clusters() if load_cluster(n).accelerator.name == accelerator), None)
        if cluster is None:
            raise InputError(
                f"no shipped cluster has {accelerator}: give --model a scenario with a cluster of its own"
            )
        moe = load_model(what).moe
        ep = next((n for n in (8, 4, 2) if moe is not None and moe.experts % n == 0), 1)
        scenario = load_scenario(
            {
                "name": "calibrate",
                "cluster": cluster,
                "model": what,
                "parallel": {"zero_stage": 3, "ep": ep},
                "batch": {"sequences": 4096, "sequence_length": LENGTH},
                "precision": "bf16",
                "recompute": "none",
                "software": {"framework": "torchtitan-0.2"},
            }
        )
    length = scenario.batch.sequence_length
    shapes = operator_shapes(scenario, (length, length // 4) if quick else (length, length // 2, length // 4))
    if scenario.software.kernels != "eager" or scenario.software.modules != "torch":
        return shapes
    compiled = operator_shapes(scenario.overridden(*COMPILED), (length,) if quick else (length, length // 4))
    return (*shapes, *(shape for shape in compiled if "compiled" in shape))


def operators_of_run(scenario: Scenario, rank: int) -> tuple[Shape, ...]:
    """Every operator of a micro-batch of a run, and those of `rank` at the end of its step.

    Pipeline ranks are counted outermost, as trainers place them. Raises InputError as `operator_shapes` does.
    """
    shapes = operator_shapes(scenario, (scenario.batch.sequence_length,))
    pool = prepare(scenario).pools[0]
    by_rank = chunks_by_rank(pool.schedule, pool.stages, by_place=scenario.software.buckets_by_chunk)
    chunks = by_rank[rank * len(by_rank) // max(pool.job.cluster.n_gpus, rank + 1)]
    ends, _ = update_operators(pool.pricer, chunks, pool.schedule)
    kept = (shape for shape in shapes if not shape["use"].startswith("optimizer/"))
    return (
        *kept,
        *({"use": f"{op.cls}/{op.variant}", "bytes": op.bytes_read + op.bytes_written} for op in ends),
    )


def _is_scenario(what: str) -> bool:
    path = Path(what)
    return path.is_file() and "cluster" in parse_mapping(path.read_text("utf-8"), what)


def operator_shapes(scenario: Scenario, sequences: Sequence[int]) -> tuple[Shape, ...]:
    """Every distinct operator of a micro-batch of the scenario, at each of these sequence lengths (tokens).

    Raises InputError where the scenario cannot be resolved.
    """
    distinct: dict[str, Shape] = {}
    for length in sequences:
        try:
            pool = prepare(scenario.overridden(f"batch.sequence_length={length}")).pools[0]
        except InfeasibleError as error:
            raise InputError(
                f"{error}; calibrate needs a plan that fits: name a scenario of your own with --model"
            ) from None
        for shape in _of_micro_batch(pool):
            distinct.setdefault(repr(sorted(shape.items())), shape)
    for use in ("optimizer/norm", "optimizer/adamw", "optimizer/update"):
        for elements in STEP_ELEMENTS:
            shape = {"use": use, "bytes": ELEMENT_BYTES[use] * elements, "launches": 1, "elements": elements}
            distinct.setdefault(repr(sorted(shape.items())), shape)
    return tuple(distinct.values())


def _of_micro_batch(pool: PreparedPool) -> Iterator[Shape]:
    for kind in pool.job.shape.block_kinds:
        layer = pool.job.shape.block(kind).layer
        attention = layer.attention if layer is not None else None
        for operators in (*pool.pricer.operators(kind).values(), gather_copies(pool.pricer, kind)):
            whole = any(op.cls == "attention_backward" and _matrix_shape(op, attention) for op in operators)
            for op in operators:
                if op.cls == "attention_pre_post" and whole:
                    continue  # part of the measured backward, see `without_timed_parts`
                yield {"use": f"{op.cls}/{op.variant}", "launches": op.launches,
                       "bytes": operator_bytes(op)} | _shape_of(op, attention, pool)  # fmt: skip


def _shape_of(op: Operator, attention: object, pool: PreparedPool) -> Shape:
    """Sizes of the operator's tensors; none where no piece of PyTorch code stands for it alone."""
    if op.cls in GEMM_CLASSES or op.cls in ATTENTION_CLASSES:
        return _matrix_shape(op, attention)
    use, software = f"{op.cls}/{op.variant}", pool.job.scenario.software
    compiled = software.compiled_blocks or (op.cls == "loss" and software.loss == "compiled")
    if compiled and (use in COMPILED_BYTES or op.name.removesuffix(".recompute") in _PERMUTED):
        shape = _tensor_shape(op, COMPILED_BYTES.get(use, 0.0), attention, pool)
        return shape and shape | {"compiled": 1}
    if use not in ELEMENT_BYTES and op.cls != "embedding" and not _of_latents(op, attention):
        return {}
    return _tensor_shape(op, ELEMENT_BYTES.get(use, 0.0), attention, pool)


_PERMUTED = {f"experts.{what}{of}" for what in ("expand", "sort", "reduce") for of in ("", "_gradient")}
"""Copies of rows in fused code."""
MLA_COPIES = {
    "kv_latent_slice", "k_rope_slice", "kv_latent.join", "k_rope_broadcast", "k_rope.sum_heads",
    "k_nope_pack", "k_nope_unpack", "v_unpack",
}  # fmt: skip


def _of_latents(op: Operator, attention: object) -> bool:
    return isinstance(attention, MLA) and op.name.removesuffix(".recompute") in MLA_COPIES


def _matrix_shape(op: Operator, attention: object) -> Shape:
    """Sizes of a GEMM or a core attention in BF16."""
    if op.gemm is None or op.dtype != "bf16" or op.variant not in ("", GROUPED_MM):
        return {}
    g = op.gemm
    if op.cls in GEMM_CLASSES:
        gate = {"turned": int(op.direction == "W")} if op.cls == "gate_gemm" else {}
        return {"use": op.cls, "m": int(g.m), "n": int(g.n), "k": int(g.k), "groups": g.groups} | gate
    if not isinstance(attention, SoftmaxAttention):
        return {}
    _, _, qk, v = attention.sizes
    heads = int(g.groups * g.m // g.n)  # of all sequences of the micro-batch
    return {"use": op.cls, "length": int(g.n), "heads": heads, "dqk": qk, "dv": v}


def _tensor_shape(op: Operator, element_bytes: float, attention: Any, pool: PreparedPool) -> Shape:
    """Sizes of an operator that memory limits; `element_bytes` are those that it moves for one element."""
    model, tokens = pool.job.shape, int(pool.pricer.tokens)
    name, moe = op.name.removesuffix(".recompute"), model.moe
    elements = round(operator_bytes(op) / element_bytes) if element_bytes else 0
    match op.cls:
        case "norm":
            width = _NORM_WIDTHS.get(name.partition(".")[0], lambda _: model.hidden)(attention)
            return {"rows": elements // width, "width": width}
        case "embedding":
            return {"tokens": tokens, "hidden": model.hidden, "vocabulary": model.vocab}
        case "topk" if moe is not None:
            return {"tokens": tokens, "experts": moe.experts, "top_k": moe.top_k}
        case "permute" if moe is not None:
            return _rows_of_experts(op, name, elements, moe, model.hidden)
        case "loss":
            vocabulary = model.vocab // pool.job.scenario.parallel.tp
            share = elements / tokens / vocabulary
            wide = {1.0: 1, 0.5: 0}.get(round(share, 2))
            return {} if wide is None else {"tokens": tokens, "vocabulary": vocabulary, "wide": wide}
        case "rope":
            turned: int = getattr(attention, "qk_rope_dim", 0) or getattr(attention, "head_dim", 0) or 1
            return {"tokens": tokens, "heads": max(1, round(elements / tokens / turned)), "width": turned}
        case "copy" if op.variant in (CAT, CAT_ROWS) and isinstance(attention, MLA):
            return _joined(name, elements, attention, pool.job.scenario.parallel.tp)
        case "swiglu" if op.variant.startswith("weight") and moe is not None:
            return {"elements": elements, "columns": moe.expert_ffn}
    if _of_latents(op, attention):
        return _heads_of_latents(op, name, attention, tokens)
    return _copied(op, name, elements, pool.job.scenario.recipe.gradient_reduce == "fp32")


def _rows_of_experts(op: Operator, name: str, elements: int, moe: MoE, hidden: int) -> Shape:
    """Sizes of what moves rows to and from experts, or counts them."""
    if op.variant == PADDING:
        return {"elements": elements, "hidden": hidden}
    if op.variant == "count":
        return {"elements": elements, "experts": moe.experts}
    if elements:
        return {"tokens": elements // (moe.top_k * hidden), "top_k": moe.top_k, "hidden": hidden,
                "experts": moe.experts}  # fmt: skip
    read, written = (round(size / BF16 / hidden) for size in (op.bytes_read, op.bytes_written))
    rows, tokens = (read, written) if op.variant == "reduce" else (written, read)
    return {"rows": rows, "tokens": tokens, "hidden": hidden}


def _heads_of_latents(op: Operator, name: str, attention: MLA, tokens: int) -> Shape:
    """Sizes of MLA's copies of latents and heads."""
    latent, turned = attention.kv_lora_rank, attention.qk_rope_dim
    if name in ("kv_latent_slice", "k_rope_slice", "kv_latent.join"):
        width = turned if name == "k_rope_slice" else latent
        return {"rows": tokens, "width": width, "whole": latent + turned}
    widths = {
        "k_nope_pack": attention.qk_nope_dim,
        "k_nope_unpack": attention.qk_nope_dim,
        "v_unpack": attention.v_dim,
    }
    width = widths.get(name, turned)
    heads = round(max(op.bytes_read, op.bytes_written) / BF16 / tokens / width)
    piece = {"piece": PIECES[name]} if name in PIECES else {}
    return {"tokens": tokens, "heads": heads, "width": width} | piece


def _joined(name: str, elements: int, attention: MLA, tp: int) -> Shape:
    """Sizes of MLA's joins: a part of every row of `whole` elements, and `more`, which heads may share."""
    nope, turned, value = attention.qk_nope_dim, attention.qk_rope_dim, attention.v_dim
    if name == "kv_latent.join":
        latent = attention.kv_lora_rank
        rows = elements // (2 * latent + turned)
        return {"tokens": rows, "heads": 1, "width": latent, "more": turned, "whole": latent + turned}
    heads, keys = attention.heads // tp, name == "k.cat"
    more, whole = (value if name == "kv_up.cat" else turned), nope + (value if keys else turned)
    read_once = (heads - 1) * turned / 2 if keys else 0.0  # what all heads share is read once
    tokens = round(elements / (heads * (nope + more) - read_once))
    sizes = {"tokens": tokens, "heads": heads, "width": nope, "more": more}
    return sizes | {"whole": whole, "shared": int(keys)}


def _copied(op: Operator, name: str, elements: int, wide: bool) -> Shape:
    """Sizes of element-wise kernels and of copies; FSDP2's are known by name."""
    if name == "fsdp.single_copy" and op.bytes_read > op.bytes_written:  # FP32 is cast to BF16 first
        return {"elements": round(operator_bytes(op) / 10.0), "piece": "single_copy"}
    if name == "fsdp.single_divide":
        return {"elements": round(operator_bytes(op) / (16.0 if wide else 8.0)), "wide": int(wide),
                "piece": "single_divide"}  # fmt: skip
    if op.variant == "pack":
        return {"elements": round(op.bytes_read / BF16), "wide": int(op.bytes_written > op.bytes_read)}
    return {"elements": elements} | ({"piece": PIECES[name]} if name in PIECES else {})


_NORM_WIDTHS: dict[str, Callable[[Any], int]] = {
    "qk_norm": lambda attention: int(attention.head_dim),
    "q_norm": lambda attention: int(attention.q_lora_rank),
    "kv_norm": lambda attention: int(attention.kv_lora_rank),
}
"""Widths of norms inside an attention by name; the others are over hidden states."""
