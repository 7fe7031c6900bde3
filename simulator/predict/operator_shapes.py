"""The operators of a step as a table of plain sizes, which `moesim calibrate` measures one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moesim.hwmodels.cluster import list_clusters, load_cluster
from moesim.hwmodels.errors import InfeasibleError, InputError
from moesim.hwmodels.yaml_io import parse_mapping
from moesim.simulator.cost.data_parallel import gather_copies
from moesim.simulator.cost.rate_tables import ATTENTION_CLASSES
from moesim.simulator.frameworks.eager import HALVES, HALVES_BACKWARD, ROW_BYTES
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.attention.softmax import SoftmaxAttention
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.operator import GEMM_CLASSES, Operator
from moesim.simulator.model.shape import ModelShape
from moesim.simulator.predict.step import PreparedPool, prepare
from moesim.simulator.scenario import Scenario, load_scenario, preset_names

ELEMENT_BYTES = {
    "norm/eager_forward": 4.0,
    "norm/eager_forward_add": 8.0,
    "norm/eager_backward": 6.0,
    "norm/eager_head_forward": 4.0,
    "norm/eager_head_backward": 6.0,
    "rope/eager": 20.0,
    "rope/eager_halves": sum(HALVES),
    "rope/eager_halves_backward": sum(HALVES_BACKWARD),
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
    "copy/gather_in": 6.0,
    "copy/add_widened": 10.0,
    "loss/eager_forward": 12.0,
    "loss/eager_backward": 16.0,
    "optimizer/norm": 4.0,
    "optimizer/adamw": 28.0,
    **{f"permute/eager_{name.removeprefix('experts.')}": size for name, size in ROW_BYTES.items()},
}
"""Bytes that an operator of this use is counted to move for one element of its tensor; a test compares them
with the operators themselves."""
STEP_ELEMENTS = (2**24, 2**27, 2**29)
"""Parameters of one GPU at which the kernels at the end of a step are measured."""
LENGTH = 4096
"""Tokens of a sequence, and of a micro-batch, where the user names a model alone."""
Shape = dict[str, Any]
"""`use`, `bytes`, `launches`, and the sizes of its tensors where a piece of code stands for the operator."""


def operators_of(what: str, accelerator: str, quick: bool) -> tuple[Shape, ...]:
    """Operators of a scenario (a preset or a file with a cluster) or of a model as torchtitan trains it.

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
    return operator_shapes(scenario, (length, length // 4) if quick else (length, length // 2, length // 4))


def _is_scenario(what: str) -> bool:
    path = Path(what)
    return path.is_file() and "cluster" in parse_mapping(path.read_text("utf-8"), what)


def operator_shapes(scenario: Scenario, sequences: Sequence[int]) -> tuple[Shape, ...]:
    """Every distinct operator of a micro-batch of the scenario, at each of these sequence lengths (tokens).

    Raises InputError where the scenario cannot be resolved.
    """
    found: dict[str, Shape] = {}
    for length in sequences:
        try:
            pool = prepare(scenario.overridden(f"batch.sequence_length={length}")).pools[0]
        except InfeasibleError as error:
            raise InputError(
                f"{error}; calibrate needs a plan that fits: name a scenario of your own with --model"
            ) from None
        for shape in _of_micro_batch(pool):
            found.setdefault(repr(sorted(shape.items())), shape)
    for use in ("optimizer/norm", "optimizer/adamw"):
        for elements in STEP_ELEMENTS:
            shape = {"use": use, "bytes": ELEMENT_BYTES[use] * elements, "launches": 1, "elements": elements}
            found.setdefault(repr(sorted(shape.items())), shape)
    return tuple(found.values())


def _of_micro_batch(pool: PreparedPool) -> Iterator[Shape]:
    model = pool.job.shape
    for kind in model.block_kinds:
        layer = model.block(kind).layer
        attention = layer.attention if layer is not None else None
        for operators in (*pool.pricer.operators(kind).values(), gather_copies(pool.pricer, kind)):
            for op in operators:
                shape = _shape_of(op, model, attention, pool.pricer.tokens, pool.job.scenario.parallel.tp)
                yield {"use": f"{op.cls}/{op.variant}", "launches": op.launches,
                       "bytes": op.bytes_read + op.bytes_written} | shape  # fmt: skip


def _shape_of(op: Operator, model: ModelShape, attention: object, tokens: float, tp: int) -> Shape:
    """Sizes of the operator's tensors; none where no piece of PyTorch code stands for it alone."""
    use, moe = f"{op.cls}/{op.variant}", model.moe
    if op.cls in GEMM_CLASSES or op.cls in ATTENTION_CLASSES:
        if op.gemm is None or op.dtype != "bf16" or op.variant:
            return {}
        g, cls = op.gemm, "gemm" if op.cls == "gate_gemm" else op.cls
        if op.cls in GEMM_CLASSES:
            return {"use": cls, "m": int(g.m), "n": int(g.n), "k": int(g.k), "groups": g.groups}
        if not isinstance(attention, SoftmaxAttention):
            return {}
        _, _, qk, v = attention.sizes
        heads = int(g.groups * g.m // g.n)  # of all sequences of the micro-batch
        return {"use": op.cls, "length": int(g.n), "heads": heads, "dqk": qk, "dv": v}
    if op.cls == "embedding":
        return {"tokens": int(tokens), "hidden": model.hidden, "vocabulary": model.vocab}
    if use not in ELEMENT_BYTES:
        return {}
    elements = round((op.bytes_read + op.bytes_written) / ELEMENT_BYTES[use])
    if op.cls == "norm":
        width = _NORM_WIDTHS.get(op.name.partition(".")[0], lambda _: model.hidden)(attention)
        return {"rows": elements // width, "width": width}
    if op.cls == "permute" and moe is not None:
        return {"tokens": elements // (moe.top_k * model.hidden), "top_k": moe.top_k, "hidden": model.hidden,
                "experts": moe.experts}  # fmt: skip
    if op.cls == "topk" and moe is not None:
        return {"tokens": int(tokens), "experts": moe.experts, "top_k": moe.top_k}
    if op.cls == "rope":
        turned: int = getattr(attention, "qk_rope_dim", 0) or getattr(attention, "head_dim", 0) or 1
        return {"tokens": int(tokens), "heads": max(1, round(elements / tokens / turned)), "width": turned}
    if use == "copy/eager_cat" and isinstance(attention, MLA):
        heads, width, more = attention.heads // tp, attention.qk_nope_dim, attention.qk_rope_dim
        tall = elements // (heads * (width + more))
        return {"tokens": tall, "heads": heads, "width": width, "more": more}
    if op.cls == "loss":
        if round(elements / tokens * tp) != model.vocab:
            return {}  # logits that are not FP32: the piece is written for those that are
        return {"tokens": int(tokens), "vocabulary": round(elements / tokens)}
    return {"elements": elements}


_NORM_WIDTHS: dict[str, Callable[[Any], int]] = {
    "qk_norm": lambda attention: int(attention.head_dim),
    "q_norm": lambda attention: int(attention.q_lora_rank),
    "kv_norm": lambda attention: int(attention.kv_lora_rank),
}
"""Widths of norms inside an attention by name; the others are over hidden states."""
