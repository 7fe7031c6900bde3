"""Pieces of the work between GEMMs as PyTorch frameworks write them, with FSDP2, clipping and optimizers.

A piece has a call, the tensors that its backward differentiates, and the bytes that one pass over them
would move. Shapes are neighbours of those of the scoreboard's rows, none the same. Pieces are
made one at a time: a piece's tensors are those of its turn, so it must be timed before the next is made.
"""

# ruff: noqa: B023 -- see above: a piece is used before the loop goes on

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

try:
    import triton
    from triton import language as tl
except ImportError:  # dry runs on a CPU
    triton = None

BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, HEAD = 8192, 128
LAYER = ((5120, 5120), (1024, 5120), (1024, 5120), (5120, 5120), (13824, 5120), (13824, 5120), (5120, 13824),
         (5120,), (5120,))  # fmt: skip
"""Parameters of one dense layer: 275 million."""
EXPERTS = ((16, 3072, 3072), (16, 3072, 3072), (16, 3072, 3072), (64, 3072), (3072,))
"""Parameters of one layer's experts, router and norm: 453 million."""


@dataclass
class TimedPiece:
    """One piece of work: `call()` runs the forward; with `leaves` its backward is timed too."""

    name: str
    call: Callable[[], Any]
    bytes: float
    leaves: list[torch.Tensor] = field(default_factory=list)
    backward_bytes: float = 0.0
    compiled: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], float] | None = None
    """Relative error against a reference, for chains that are written here."""


class Make:
    """Tensors on a device, every side divided for dry runs."""

    def __init__(self, device: str, shrink: int) -> None:
        """Remember where and by what to divide."""
        self.device, self.shrink = device, shrink

    def size(self, n: int) -> int:
        """A side, divided in dry runs and a multiple of 16."""
        return n if self.shrink == 1 or n <= 64 else max(16, n // self.shrink // 16 * 16)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
        """Random normal numbers; sides above 64 are divided in dry runs."""
        sides = tuple(self.size(n) for n in shape)
        return torch.randn(sides, device=self.device, dtype=dtype).requires_grad_(grad)


def pieces_of(size: float, at: dict[str, Any]) -> Callable[..., TimedPiece]:
    """Makes pieces of the sizes `at`, whose bytes are stated as multiples of `size`."""

    def piece(
        name: str,
        call: Callable[[], Any],
        passes: float,
        leaves: Sequence[torch.Tensor] = (),
        backward_passes: float = 0.0,
        compiled: bool = False,
    ) -> TimedPiece:
        return TimedPiece(name, call, passes * size, list(leaves), backward_passes * size, compiled, at)

    return piece


# --- norms, residuals, casts -------------------------------------------------------------------------


def plain_rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm as Hugging Face's models write it."""
    wide = x.to(FP32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def add_norm(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A residual and the norm behind it."""
    total = x + r
    return total, F.rms_norm(total, (total.shape[-1],), weight, 1e-6)


def norms(make: Make) -> Iterator[TimedPiece]:
    """Norms and residuals: all tokens without sequence parallelism, a half and an eighth of them with it."""
    for hidden in (5120, 6144, 3072):
        for rows in (TOKENS, TOKENS // 2, TOKENS // 8):
            x, r = make.normal(rows, hidden, grad=True), make.normal(rows, hidden, grad=True)
            gain, bias = make.normal(hidden, grad=True), make.normal(hidden, grad=True)
            width = (x.shape[-1],)
            piece = pieces_of(2.0 * x.numel(), {"rows": x.shape[0], "hidden": x.shape[1]})
            yield piece("rms_norm", lambda: F.rms_norm(x, width, gain, 1e-6), 2, [x, gain], 3)
            yield piece("layer_norm", lambda: F.layer_norm(x, width, gain, bias), 2, [x, gain, bias], 3)
            yield piece("residual add", lambda: x.detach() + r.detach(), 3)
            if hidden == 5120:
                plain = "rms_norm of plain operators"
                yield piece(plain, lambda: plain_rms(x, gain), 2, [x, gain], 3)
                if rows != TOKENS // 2:
                    yield piece(plain, lambda: plain_rms(x, gain), 2, [x, gain], 3, True)
                    yield piece(
                        "residual and rms_norm", lambda: add_norm(x, r, gain), 4, [x, r, gain], 5, True
                    )
    for heads in (48, 8):
        q, gain = make.normal(TOKENS, heads, HEAD, grad=True), make.normal(HEAD, grad=True)
        width = (q.shape[-1],)
        piece = pieces_of(2.0 * q.numel(), {"rows": q.shape[0] * q.shape[1], "hidden": q.shape[2]})
        yield piece("rms_norm of heads", lambda: F.rms_norm(q, width, gain, 1e-6), 2, [q, gain], 3)


def casts(make: Make) -> Iterator[TimedPiece]:
    """Casts between BF16 and FP32, and additions into FP32 gradients."""
    for hidden in (3072, 6144, 12288):
        x = make.normal(TOKENS, hidden)
        wide = make.normal(TOKENS, hidden, dtype=FP32)
        piece = pieces_of(float(x.numel()), {"elements": x.numel()})
        yield piece("cast to fp32", lambda: x.to(FP32), 6)
        yield piece("cast to bf16", lambda: wide.to(BF16), 6)
        yield piece("fp32 gradient += bf16", lambda: wide.add_(x), 10)
        yield piece("bf16 gradient += bf16", lambda: x.add_(x), 6)


# --- rope ---------------------------------------------------------------------------------------------


def rope_complex(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding with complex numbers, as torchtitan's Llama has it."""
    pairs = [torch.view_as_complex(z.float().reshape(*z.shape[:-1], -1, 2)) for z in (q, k)]
    done = [torch.view_as_real(z * angles).flatten(2) for z in pairs]
    return done[0].type_as(q), done[1].type_as(k)


def _half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope_halves(
    q: torch.Tensor, k: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding by halves, as Hugging Face's models have it."""
    return q * cosine + _half(q) * sine, k * cosine + _half(k) * sine


def ropes(make: Make) -> Iterator[TimedPiece]:
    """Rotary embeddings of the heads that TP 1, 2 and 8 leave a rank."""
    for tp in (1, 2, 8):
        q, k = make.normal(TOKENS, 40 // tp, HEAD, grad=True), make.normal(TOKENS, 8 // tp, HEAD, grad=True)
        angle = torch.rand(q.shape[0], 1, q.shape[-1] // 2, device=make.device)
        turn = torch.polar(torch.ones_like(angle), angle)
        both = torch.cat((angle, angle), -1)
        cosine, sine = both.cos().to(BF16), both.sin().to(BF16)
        piece = pieces_of(float(q.numel() + k.numel()), {"heads": 48 // tp, "rows": q.shape[0]})
        for compiled in (False, True) if tp != 2 else (False,):
            yield piece("rope complex", lambda: rope_complex(q, k, turn), 4, [q, k], 4, compiled)
            yield piece("rope halves", lambda: rope_halves(q, k, cosine, sine), 4, [q, k], 4, compiled)


# --- activations --------------------------------------------------------------------------------------


def clamped_swiglu(x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """gpt-oss' activation: gate and up interleaved, both clamped, and one added to the up part."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def activations(make: Make) -> Iterator[TimedPiece]:
    """SwiGLU of dense FFNs at TP 1, 2 and 8 and of experts; clamped with biases, as gpt-oss' experts."""
    for width in (13824, 6912, 1728):
        g, u = make.normal(TOKENS, width, grad=True), make.normal(TOKENS, width, grad=True)
        piece = pieces_of(2.0 * g.numel(), {"rows": g.shape[0], "width": g.shape[1]})
        for compiled in (False, True) if width != 6912 else (False,):
            yield piece("swiglu", lambda: F.silu(g) * u, 3, [g, u], 5, compiled)
    for width in (2560, 3072):
        rows, experts = TOKENS * 4, 32
        x = make.normal(rows, 2 * width, grad=True)
        # The size is the bytes of the output.
        piece = pieces_of(float(x.numel()), {"rows": x.shape[0], "width": x.shape[1] // 2})
        for compiled in (False, True) if width == 3072 else (False,):
            yield piece("clamped swiglu", lambda: clamped_swiglu(x), 3, [x], 5, compiled)
        bias = make.normal(experts, 2 * width, grad=True)
        counts = torch.full((experts,), x.shape[0] // experts, device=make.device)
        total = int(x.shape[0] // experts * experts)

        def biased() -> torch.Tensor:
            return x[:total] + bias.repeat_interleave(counts, dim=0, output_size=total)

        yield piece("biases of experts repeated and added", biased, 4, [x, bias], 4)
        out, score = make.normal(rows, width, grad=True), make.normal(rows, 1, dtype=FP32, grad=True)
        weighted = lambda: (out.float() * score).to(BF16)  # noqa: E731
        yield piece("rows times routing weights in fp32", weighted, 2, [out, score], 3)


# --- loss ---------------------------------------------------------------------------------------------


class VocabularyParallel(torch.autograd.Function):  # type: ignore[misc]
    """The kernels of a cross-entropy over a part of the vocabulary, without its three all-reduces."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Loss per token; keeps the softmax."""
        wide = logits.float()
        wide -= wide.max(dim=-1)[0].unsqueeze(-1)
        outside = (labels < first) | (labels >= last)
        local = labels.clone() - first
        local[outside] = 0
        rows = torch.arange(wide.shape[0], device=wide.device)
        predicted = wide[rows, local].clone()
        predicted[outside] = 0.0
        exponents = torch.exp(wide, out=wide)
        total = exponents.sum(dim=-1)
        loss = torch.log(total) - predicted
        exponents.div_(total.unsqueeze(-1))
        ctx.kept = exponents, outside, local, logits.dtype  # the backward overwrites what it reads
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Softmax less the one-hot labels, times the gradient of each token."""
        softmax, outside, local, dtype = ctx.kept
        rows = torch.arange(softmax.shape[0], device=softmax.device)
        softmax[rows, local] -= 1.0 - outside.float()
        softmax.mul_(gradients[0].unsqueeze(-1))
        return softmax.to(dtype), None, None, None


def plain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits cast to FP32."""
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def chunked_loss(logits: torch.Tensor, labels: torch.Tensor, chunks: int = 8) -> torch.Tensor:
    """The same in chunks of tokens."""
    parts = zip(logits.chunk(chunks), labels.chunk(chunks), strict=True)
    losses = [plain_loss(x, y) for x, y in parts]
    return torch.stack(losses).sum()


def losses(make: Make) -> Iterator[TimedPiece]:
    """Logits to FP32 and cross-entropy: eager, compiled, chunked, and of a part of the vocabulary."""
    for tokens, vocabulary in ((4096, 100352), (8192, 64000)):
        x = make.normal(tokens, vocabulary, grad=True)
        labels = torch.randint(0, x.shape[1], (x.shape[0],), device=make.device)
        piece = pieces_of(2.0 * x.numel(), {"tokens": x.shape[0], "vocabulary": x.shape[1]})
        yield piece("loss eager", lambda: plain_loss(x, labels), 1, [x], 2)
        if tokens == 4096:
            yield piece("loss eager", lambda: plain_loss(x, labels), 1, [x], 2, True)
            yield piece("loss in 8 chunks", lambda: chunked_loss(x, labels), 1, [x], 2)
        yield piece("logits to fp32", lambda: x.detach().float(), 3)
    for tp in (1, 2, 8):
        whole = 100352 if tp > 1 else 50176
        x = make.normal(4096, whole // tp, grad=True)
        labels = torch.randint(0, x.shape[1], (x.shape[0],), device=make.device)
        size, at = 2.0 * x.numel(), {"tokens": x.shape[0], "vocabulary": x.shape[1], "tp": tp}

        def call() -> torch.Tensor:
            return VocabularyParallel.apply(x, labels, 0, x.shape[1])

        def check() -> float:
            ours, theirs = call(), F.cross_entropy(x.float(), labels, reduction="none")
            a, b = torch.autograd.grad(ours.sum(), x)[0], torch.autograd.grad(theirs.sum(), x)[0]
            error = (ours - theirs).norm() / theirs.norm() + (a.float() - b.float()).norm() / b.float().norm()
            return float(error)

        yield TimedPiece("loss of a part of the vocabulary", call, size, [x], 2 * size, sizes=at, check=check)


# --- FSDP2, clipping and optimizers; GEMMs beside copies ---------------------------------------------


def sharded_parameters(make: Make) -> Iterator[TimedPiece]:
    """What FSDP2 runs around its collectives for one group of parameters, at 1, 8 and 64 shards.

    The calls are those of torch's `_fsdp_collectives.py`; a group of one member runs them too.
    """
    for title, shapes in (("dense layer", LAYER), ("experts", EXPERTS)):
        for world in (1, 8, 64):
            yield from _gathered(make, title, shapes, world)
            yield from _reduced(make, title, shapes, world)


def _padded(shape: tuple[int, ...], world: int) -> tuple[int, ...]:
    return (math.ceil(shape[0] / world) * world, *shape[1:])


def _gathered(
    make: Make, title: str, shapes: tuple[tuple[int, ...], ...], world: int
) -> Iterator[TimedPiece]:
    """The cast of the shards, their copy into the gathered buffer, and the copies out of it."""
    whole = [_padded(tuple(make.size(n) for n in shape), world) for shape in shapes]
    counts = [math.prod(shape) // world for shape in whole]
    total = sum(counts)
    shards = [torch.randn(count, device=make.device) for count in counts]
    flat = torch.empty(total, device=make.device, dtype=BF16)
    gathered = torch.empty(total * world, device=make.device, dtype=BF16)
    slots, parts = list(flat.split(counts)), list(gathered.narrow(0, 0, total).split(counts))
    outputs = [torch.empty(count * world, device=make.device, dtype=BF16) for count in counts]
    views = [out.view(world, -1) for out in outputs]
    at = {"group": title, "shards": world, "parameters": total * world, "tensors": len(counts)}
    piece = pieces_of(float(total), at)
    copy_out = lambda: torch.split_with_sizes_copy(gathered.view(world, -1), counts, dim=1, out=views)  # noqa: E731

    yield piece("fsdp cast of shards to bf16", lambda: torch._foreach_copy_(slots, shards), 6)
    yield piece("fsdp copy in", lambda: torch._foreach_copy_(parts, slots), 4)
    yield piece("fsdp copy out", copy_out, 4 * world)


def _reduced(make: Make, title: str, shapes: tuple[tuple[int, ...], ...], world: int) -> Iterator[TimedPiece]:
    """Packing of gradients, the copy in place of a reduce-scatter of one member, division, accumulation."""
    sides = [tuple(make.size(n) for n in shape) for shape in shapes]
    grads = [torch.randn(shape, device=make.device, dtype=BF16) for shape in sides]
    padded = sum(math.prod(_padded(shape, world)) for shape in sides)
    real = float(sum(g.numel() for g in grads))
    wide = torch.empty(padded, device=make.device)
    narrow = torch.empty(padded, device=make.device, dtype=BF16)
    shard = torch.randn(padded // world, device=make.device)
    total = torch.zeros(padded // world, device=make.device)
    at = {"group": title, "shards": world, "parameters": padded, "tensors": len(grads)}
    piece = pieces_of(float(padded), at)

    def pack(out: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch._chunk_cat(grads, dim=0, num_chunks=world, out=out.view(world, -1))

    yield TimedPiece("fsdp packing of gradients to fp32", pack(wide), 2 * real + 4.0 * padded, sizes=at)
    yield TimedPiece("fsdp packing of gradients in bf16", pack(narrow), 2 * real + 2.0 * padded, sizes=at)
    yield piece("fsdp division of the buffer", lambda: wide.div_(8.0), 8)
    yield piece("fsdp accumulation of the shard", lambda: total.add_(shard), 12 / world)
    if world == 1:
        out = torch.empty_like(wide)
        yield piece("fsdp copy of one member", lambda: out.copy_(wide), 8)
        yield piece("fsdp division and copy of one member", lambda: out.copy_(wide / 8.0), 16)


def steps(make: Make) -> Iterator[TimedPiece]:
    """Global norm, clipping and Adam: few large tensors, and many small shards of 64 members."""
    plans = (("one layer whole", 1, 1), ("four layers whole", 4, 1), ("32 layers of 64 shards", 32, 64))
    for title, layers, world in plans:
        shapes = [tuple(make.size(n) for n in shape) for shape in LAYER * layers]
        counts = [math.ceil(math.prod(shape) / world) for shape in shapes]
        values = [torch.randn(count, device=make.device) for count in counts]
        for value in values:
            value.grad = torch.randn_like(value)
        grads = [value.grad for value in values]
        n = sum(counts)
        piece = pieces_of(float(n), {"tensors": len(counts), "parameters": n, "title": title})
        one = torch.ones((), device=make.device)

        def norm() -> torch.Tensor:
            return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)

        yield piece("global norm", norm, 4)
        yield piece("clipping", lambda: torch._foreach_mul_(grads, one), 8)
        yield piece("zero gradients", lambda: torch._foreach_zero_(grads), 4)
        for kind in ("fused", "foreach"):
            if kind == "foreach" and layers == 4:
                continue  # its temporaries would take 20 GB
            adam = torch.optim.AdamW(values, lr=1e-5, fused=kind == "fused", foreach=kind == "foreach")
            yield piece(f"adamw {kind} fp32", adam.step, 28)
            adam.state.clear()
        if layers != 4:
            narrow = [torch.empty_like(value, dtype=BF16) for value in values]
            yield piece("masters to bf16", lambda: torch._foreach_copy_(narrow, values), 6)
        if layers == 1:  # weights, gradients and moments in BF16
            values = [torch.randn(count, device=make.device, dtype=BF16) for count in counts]
            for value in values:
                value.grad = torch.randn_like(value)
            yield piece("adamw fused bf16", torch.optim.AdamW(values, lr=1e-5, fused=True).step, 14)


if triton is not None:

    @triton.jit
    def copy_words(source, target, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Copy `words` 32-bit words; every thread block takes one block of BLOCK words after the other."""
        first = tl.program_id(0) * BLOCK
        stride = tl.num_programs(0) * BLOCK
        for start in range(first, words, stride):
            at = start + tl.arange(0, BLOCK)
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def beside_copies(make: Make, seconds: Callable[[Callable[[], Any], int], float]) -> Iterator[dict[str, Any]]:
    """GEMMs alone and beside copies on another stream: over PCIe either way, on the device, and by few SMs.

    `seconds(call, repeats)` times repeated calls on the current stream. A copy over PCIe moves about what
    a pipeline send moves over a NIC, without SMs; a copy kernel on few thread blocks stands for NCCL's sends.
    """
    aside = torch.cuda.Stream()
    host = torch.empty(512 * 2**20, dtype=torch.uint8).pin_memory()
    source = torch.randint(0, 255, (512 * 2**20,), device=make.device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def blocks(count: int) -> Callable[[], Any]:
        words, a, b = source.numel() // 4, source.view(torch.int32), target.view(torch.int32)
        return lambda: copy_words[(count,)](a, b, words, BLOCK=4096, num_warps=16)

    copies: dict[str, Callable[[], Any] | None] = {
        "alone": None,
        "device to host": lambda: host.copy_(source, non_blocking=True),
        "host to device": lambda: target.copy_(host, non_blocking=True),
        "device to device": lambda: target.copy_(source),
        "copy kernel on 4 blocks": blocks(4),
        "copy kernel on 16 blocks": blocks(16),
    }
    for m, n, k in ((4096, 6144, 5120), (8192, 3072, 6144)):
        a, b = make.normal(m, k), make.normal(n, k).t()
        out = torch.empty(m, n, device=make.device, dtype=BF16)
        repeats = 150
        for name, copy in copies.items():
            yield _beside(aside, name, copy, lambda: torch.mm(a, b, out=out), repeats, seconds) | {
                "m": m, "n": n, "k": k, "copy_bytes": source.numel(), "flop": 2.0 * m * n * k,
            }  # fmt: skip


def _beside(
    aside: Any, name: str, copy: Callable[[], Any] | None, gemm: Callable[[], Any], repeats: int, seconds: Any
) -> dict[str, Any]:
    """Seconds of a GEMM while the copy repeats on another stream, and of a copy during that."""
    if copy is None:
        return {"beside": name, "gemm_s": seconds(gemm, repeats)}
    copy()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with torch.cuda.stream(aside):
        marks[0].record()
        copy()
        marks[1].record()
    torch.cuda.synchronize()
    once = marks[0].elapsed_time(marks[1]) * 1e-3
    count = max(2, math.ceil(0.4 / once))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    with torch.cuda.stream(aside):
        torch.cuda._sleep(2_000_000)
        events[0].record()
        for i in range(count):
            copy()
            events[i + 1].record()
    took = seconds(gemm, repeats)
    still = not aside.query()
    torch.cuda.synchronize()
    beside = sorted(x.elapsed_time(y) * 1e-3 for x, y in itertools.pairwise(events))
    return {"beside": name, "gemm_s": took, "copy_alone_s": once, "copy_s": beside[len(beside) // 2],
            "copy_outlasted": still}  # fmt: skip
