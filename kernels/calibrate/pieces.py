"""PyTorch code of a step's operators, the second part: copies of MLA and FSDP2, clipping, and compiled code.

Each function makes the call of one operator from its sizes, as those of `operators.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from moesim.kernels.calibrate.compute import torch

Call = Callable[[], Any]
TENSORS = 8
"""Parameters of an optimizer, or gradients of a group, are split into so many tensors."""
RANKS = 2
"""Ranks whose shards a gathered buffer holds."""


def normal(*shape: int, grad: bool = False, wide: bool = False) -> Any:
    """Random normal numbers on the GPU, in BF16 or FP32 (`wide`)."""
    t = torch()
    return t.randn(shape, device="cuda", dtype=t.float32 if wide else t.bfloat16).requires_grad_(grad)


def passes(function: Callable[..., Any], *leaves: Any, backward: bool) -> Call:
    """The forward of a piece, or the backward of one forward that is kept."""
    if not backward:
        return lambda: function(*leaves)
    t = torch()
    y = function(*leaves)
    outputs = y if isinstance(y, tuple) else (y,)
    gradients = [t.randn_like(one) for one in outputs]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return lambda: t.autograd.grad(outputs, wanted, gradients, retain_graph=True)


# -- clipping, small kernels -----------------------------------------------------------------------------


def clipping(p: Mapping[str, Any], backward: bool) -> Call:
    """The scaling of all gradients by one coefficient, as `clip_grad_norm_` does behind the norm."""
    t = torch()
    grads = [normal(p["elements"] // TENSORS, wide=True) for _ in range(TENSORS)]
    coefficient = t.ones((), device="cuda")
    return lambda: t._foreach_mul_(grads, coefficient)


def count(p: Mapping[str, Any], backward: bool) -> Call:
    """Rows of every expert, from the choices of all tokens."""
    t, experts = torch(), p["experts"]
    chosen = t.randint(0, experts, (p["elements"],), device="cuda")
    return lambda: t.histc(chosen, bins=experts, min=0, max=experts)


def tiny(p: Mapping[str, Any], backward: bool) -> Call:
    """One routing weight for every row."""
    x = normal(p["elements"], wide=True)
    return lambda: x * 1.0


def positions(p: Mapping[str, Any], backward: bool) -> Call:
    """Two lists of the positions of a sequence."""
    t, n = torch(), p["elements"]
    return lambda: (t.arange(n, device="cuda"), t.arange(n, device="cuda"))


# -- latents and heads of MLA ----------------------------------------------------------------------------


def sliced(p: Mapping[str, Any], backward: bool) -> Call:
    """The latent or the rotated key out of the down-projection's rows."""
    x = normal(p["rows"], p["whole"])
    return lambda: x[:, : p["width"]].contiguous()


def joined(p: Mapping[str, Any], backward: bool) -> Call:
    """Gradients of both slices of the down-projection's rows: each into zeros, then their sum."""
    return passes(
        lambda x: (x[:, : p["width"]], x[:, p["width"] :]),
        normal(p["rows"], p["whole"], grad=True),
        backward=True,
    )


def strided(p: Mapping[str, Any], backward: bool) -> Call:
    """A part of every head from one tensor into another, whose heads are wider too."""
    width = p["width"]
    source, target = (normal(p["tokens"], p["heads"], width + more) for more in (128, 64))
    return lambda: target[..., :width].copy_(source[..., :width])


def broadcast(p: Mapping[str, Any], backward: bool) -> Call:
    """The rotated key, which all heads share, into every head."""
    key = normal(p["tokens"], 1, p["width"])
    target = normal(p["tokens"], p["heads"], p["width"] + 128)
    return lambda: target[..., 128:].copy_(key.expand(-1, p["heads"], -1))


def summed_heads(p: Mapping[str, Any], backward: bool) -> Call:
    """The gradient of the rotated key: the sum over all heads."""
    x = normal(p["tokens"], p["heads"], p["width"] + 128)
    return lambda: x[..., 128:].sum(1)


# -- FSDP2 -------------------------------------------------------------------------------------------------
# torch 2.11 torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py.


def copy_out(p: Mapping[str, Any], backward: bool) -> Call:
    """Gathered shards of all parameters of a block into whole parameters (`split_with_sizes_copy`)."""
    t = torch()
    own = p["elements"] // TENSORS // RANKS
    gathered = normal(RANKS, TENSORS * own)
    whole = [t.empty(RANKS, own, device="cuda", dtype=t.bfloat16) for _ in range(TENSORS)]
    return lambda: t.split_with_sizes_copy(gathered, [own] * TENSORS, dim=1, out=whole)


def single_copy(p: Mapping[str, Any], backward: bool) -> Call:
    """A group of one member: parameters in FP32 are cast, and copied to where the forward reads them."""
    t = torch()
    held = [normal(p["elements"] // TENSORS, wide=True) for _ in range(TENSORS)]
    whole = [t.empty_like(one, dtype=t.bfloat16) for one in held]

    def copied() -> None:
        t._foreach_copy_(whole, [one.bfloat16() for one in held])

    return copied


def single_divide(p: Mapping[str, Any], backward: bool) -> Call:
    """A group of one member: packed gradients are divided into a second buffer and copied into a third."""
    t = torch()
    packed = normal(p["elements"], wide=bool(p["wide"]))
    reduced = t.empty_like(packed)
    return lambda: reduced.copy_(t.div(packed, 2.0))


EAGER: dict[str, Callable[[Mapping[str, Any], bool], Call]] = {
    "optimizer/update": clipping,
    "permute/count": count,
    "elementwise/tiny": tiny,
    "elementwise/positions": positions,
    "copy/slice": sliced,
    "elementwise/join": joined,
    "strided": strided,
    "copy/broadcast": broadcast,
    "elementwise/reduce": summed_heads,
    "copy_out": copy_out,
    "single_copy": single_copy,
    "single_divide": single_divide,
}
"""What stands for a use, or for the piece that a row of the table names."""

# -- compiled ----------------------------------------------------------------------------------------------


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as `torch.compile` makes it, whose backward can run more than once."""
    import_module("torch._dynamo").reset()  # else another size counts as a recompilation of this one
    setattr(import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010
    call: Callable[..., Any] = torch().compile(function, dynamic=False)
    return call


def compiled_norm(p: Mapping[str, Any], backward: bool) -> Call:
    """RMS norm; `norm/forward_add` adds the residual in the same kernel and keeps the sum."""
    f, width = torch().nn.functional, p["width"]
    x, gain = normal(p["rows"], width, grad=True), normal(width, grad=True)
    if p["use"].endswith("_add"):

        def added(x: Any, r: Any, gain: Any) -> tuple[Any, Any]:
            total = x + r
            return total, f.rms_norm(total, (width,), gain)

        return passes(_compiled(added), x, normal(p["rows"], width), gain, backward=False)
    return passes(_compiled(lambda x, gain: f.rms_norm(x, (width,), gain)), x, gain, backward=backward)


def compiled_rope(p: Mapping[str, Any], backward: bool) -> Call:
    """Rotary embedding with complex numbers, which `torch.compile` mostly leaves to PyTorch's own kernels."""
    t = torch()
    x = normal(1, p["tokens"], p["heads"], p["width"])
    angle = t.rand(1, p["tokens"], 1, p["width"] // 2, device="cuda")
    turn = t.polar(t.ones_like(angle), angle)

    def turned(x: Any, turn: Any) -> Any:
        z = t.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return t.view_as_real(z * turn).flatten(3).to(x.dtype)

    return passes(_compiled(turned), x, turn, backward=False)


def compiled_swiglu(p: Mapping[str, Any], backward: bool) -> Call:
    """silu(gate) * up in one kernel; of routed rows also times their weight, and that weight's gradient."""
    f, n, columns = torch().nn.functional, p["elements"], p.get("columns", 0)
    if not columns:
        leaves = [normal(n, grad=True) for _ in range(2)]
        return passes(_compiled(lambda gate, up: f.silu(gate) * up), *leaves, backward=backward)
    rows = n // columns
    if p["use"] == "swiglu/weight_backward":
        pair = [normal(rows, columns) for _ in range(2)]
        return passes(_compiled(lambda y, g: (y.float() * g.float()).sum(1)), *pair, backward=False)
    leaves = [normal(rows, columns, grad=True) for _ in range(2)]
    weight = normal(rows, 1, wide=True)
    function = _compiled(lambda gate, up, w: (f.silu(gate) * up * w).to(gate.dtype))
    return passes(function, *leaves, weight, backward=True)


def compiled_topk(p: Mapping[str, Any], backward: bool) -> Call:
    """The router from its logits on, as `operators.topk` runs it eagerly."""
    t = torch()
    experts, k = p["experts"], p["top_k"]

    def gate(z: Any, bias: Any) -> Any:
        scores = t.softmax(z.float(), dim=1)
        chosen = t.topk(scores + bias, k=k, dim=-1, sorted=False)[1]
        counts = t.histc(chosen.view(-1).float(), bins=experts, min=0, max=experts)
        return scores.gather(1, chosen) * 1.0, counts, t.argsort(chosen.view(-1), stable=True)

    function = _compiled(gate)
    logits, bias = normal(p["tokens"], experts, grad=True), t.zeros(experts, device="cuda")
    if not backward:
        return lambda: function(logits, bias)
    return passes(lambda z: function(z, bias)[0], logits, backward=True)


def compiled_loss(p: Mapping[str, Any], backward: bool) -> Call:
    """Cross-entropy of logits in FP32, or of BF16 ones that it casts."""
    t = torch()
    logits = normal(p["tokens"], p["vocabulary"], wide=bool(p["wide"]), grad=True)
    labels = t.randint(0, p["vocabulary"], (p["tokens"],), device="cuda")
    function = _compiled(lambda z, y: t.nn.functional.cross_entropy(z.float(), y))
    return passes(function, logits, labels, backward=backward)


def compiled_permute(p: Mapping[str, Any], backward: bool) -> Call:
    """Rows by index (`expand`), or sums of the rows of every token (`reduce`)."""
    t, rows, tokens, hidden = torch(), p["rows"], p["tokens"], p["hidden"]
    if p["use"] == "permute/expand":
        index = t.randint(0, tokens, (rows,), device="cuda")
        return passes(_compiled(lambda x, i: x[i]), normal(tokens, hidden), index, backward=False)
    k = max(1, rows // tokens)
    order = t.randperm(tokens * k, device="cuda")

    def reduced(z: Any, i: Any) -> Any:
        return z[i].view(-1, k, hidden).float().sum(1).to(z.dtype)

    return passes(_compiled(reduced), normal(tokens * k, hidden), order, backward=False)


COMPILED: dict[str, Callable[[Mapping[str, Any], bool], Call]] = {
    "norm": compiled_norm,
    "rope": compiled_rope,
    "swiglu": compiled_swiglu,
    "topk": compiled_topk,
    "loss": compiled_loss,
    "permute": compiled_permute,
}
"""What stands for the operators of a class that `torch.compile` compiles."""
