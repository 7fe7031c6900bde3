"""Small models whose training steps `allocator.py` runs to record what PyTorch's allocator does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class SmallModel:
    """One model and the way it is trained. `experts` are those of all ranks, 1 / `ep` of them are here."""

    name: str
    hidden: int = 3072
    ffn: int = 8192
    heads: int = 24
    kv_heads: int = 8
    layers: int = 6
    vocabulary: int = 64000
    sequence: int = 4096
    microbatch: int = 1
    microbatches: int = 1
    recompute: str = "none"
    ranks: int = 8
    reshard: bool = True
    experts: int = 0
    ep: int = 8
    top_k: int = 6
    expert_ffn: int = 1024
    shared_ffn: int = 2048
    mla: bool = False
    loss: str = "eager"
    expandable: bool = False
    steps: int = 3

    def small(self) -> SmallModel:
        """The same case with tiny sizes, for a run on a CPU."""
        values = {
            **vars(self),
            "hidden": 64,
            "ffn": 96,
            "heads": 4,
            "kv_heads": 2,
            "layers": 2,
            "vocabulary": 128,
        }
        return SmallModel(**values | {"sequence": 32, "expert_ffn": 32, "shared_ffn": 48, "steps": 2})


@torch.library.custom_op("moesim_allocator::exchange", mutates_args=())
def exchange(x: torch.Tensor) -> torch.Tensor:
    """Stand-in for an all-to-all that receives as many rows as it sends."""
    return x.clone()


@exchange.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


exchange.register_autograd(lambda ctx, g: torch.ops.moesim_allocator.exchange(g.contiguous()))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> torch.Tensor:
    """Causal attention over (batch, heads, sequence, width), with the backends in torchtitan's order."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def rotate(x: torch.Tensor, wave: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of elements as complex numbers in FP32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * wave[None, : x.shape[1], None, :]).flatten(3).to(x.dtype)


class GroupedAttention(nn.Module):  # type: ignore[misc]
    """Attention with grouped keys and values."""

    def __init__(self, case: SmallModel) -> None:
        """Build the four projections."""
        super().__init__()
        self.heads, self.kv_heads, self.size = case.heads, case.kv_heads, case.hidden // case.heads
        self.wq = nn.Linear(case.hidden, case.hidden, bias=False)
        self.wk = nn.Linear(case.hidden, self.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(case.hidden, self.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(case.hidden, case.hidden, bias=False)

    def forward(self, x: torch.Tensor, wave: torch.Tensor) -> torch.Tensor:
        """Attend over (batch, sequence, hidden)."""
        b, s, _ = x.shape
        q, k, v = (w(x).view(b, s, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, wave), rotate(k, wave)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend(q, k, v, self.heads != self.kv_heads)
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))


class LatentAttention(nn.Module):  # type: ignore[misc]
    """Attention whose keys and values come from a latent of 384 elements, without a latent of queries."""

    def __init__(self, case: SmallModel) -> None:
        """Build the projections."""
        super().__init__()
        self.heads, self.latent, self.nope, self.rope, self.value = case.heads, 384, 96, 32, 96
        self.wq = nn.Linear(case.hidden, self.heads * (self.nope + self.rope), bias=False)
        self.wkv_a = nn.Linear(case.hidden, self.latent + self.rope, bias=False)
        self.norm = nn.RMSNorm(self.latent)
        self.wkv_b = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.wo = nn.Linear(self.heads * self.value, case.hidden, bias=False)

    def forward(self, x: torch.Tensor, wave: torch.Tensor) -> torch.Tensor:
        """Attend over (batch, sequence, hidden)."""
        b, s, _ = x.shape
        q = self.wq(x).view(b, s, -1, self.nope + self.rope)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([q_nope, rotate(q_rope, wave)], dim=-1)
        latent, k_rope = self.wkv_a(x).split([self.latent, self.rope], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(2), wave)
        kv = self.wkv_b(self.norm(latent)).view(b, s, -1, self.nope + self.value)
        k_nope, v = kv.split([self.nope, self.value], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, self.heads, -1)], dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend(q, k, v, grouped=False)
        return self.wo(out.transpose(1, 2).contiguous().view(b, s, -1))


class GatedFeedForward(nn.Module):  # type: ignore[misc]
    """A gated feed-forward network."""

    def __init__(self, hidden: int, width: int) -> None:
        """Build the three projections."""
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., hidden) to (..., hidden)."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):  # type: ignore[misc]
    """The experts of one rank."""

    def __init__(self, case: SmallModel) -> None:
        """Build the weights of 1 / ep of the experts."""
        super().__init__()
        here, h, f = case.experts // case.ep, case.hidden, case.expert_ffn
        self.w1, self.w2, self.w3 = (
            nn.Parameter(0.02 * torch.randn(here, *shape)) for shape in ((f, h), (h, f), (f, h))
        )

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Map rows, grouped by expert, to rows."""
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        mm: Callable[..., torch.Tensor] = partial(torch._grouped_mm, offs=ends)
        if rows.device.type == "cpu":
            mm = lambda a, w: torch.bmm(a.view(len(w), -1, a.shape[-1]), w).flatten(0, 1)  # noqa: E731
        inner = F.silu(mm(rows, self.w1.transpose(-2, -1)))
        inner = inner * mm(rows, self.w3.transpose(-2, -1))
        return mm(inner, self.w2.transpose(-2, -1))


class RoutedLayer(nn.Module):  # type: ignore[misc]
    """Routed and shared experts; tokens go to the experts in turn, and an exchange copies its rows."""

    def __init__(self, case: SmallModel) -> None:
        """Build router and experts."""
        super().__init__()
        self.case = case
        self.gate = nn.Linear(case.hidden, case.experts, bias=False)
        self.experts = Experts(case)
        self.shared = GatedFeedForward(case.hidden, case.shared_ffn)
        self.register_buffer("bias", torch.zeros(case.experts))
        self.register_buffer("seen", torch.zeros(case.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        case, shape = self.case, x.shape
        x = x.view(-1, case.hidden)
        k, rows = case.top_k, x.shape[0] * case.top_k
        scores = F.softmax(self.gate(x).to(FP32), dim=1)
        torch.topk(scores + self.bias, k=k, dim=-1, sorted=False)
        chosen = torch.arange(rows, device=x.device).reshape(-1, k) % case.experts
        top = scores.gather(1, chosen) * 1.0
        flat = chosen.view(-1)
        counts = torch.bincount(flat, minlength=case.experts).float()
        with torch.no_grad():
            self.seen.add_(counts)
        order = torch.argsort(flat, stable=True)
        sent = x[order // k]
        received = torch.ops.moesim_allocator.exchange(sent)
        here = case.experts // case.ep
        longer = torch.vstack((received, received.new_zeros(received.shape[-1])))
        pad = rows + (0 if x.device.type == "cpu" else 8 * here)
        places = torch.full((pad,), rows, device=x.device, dtype=torch.int64)
        places[:rows] = torch.arange(rows, device=x.device)
        grouped = longer[places, :]
        share = torch.full((here,), rows // here // 8 * 8, device=x.device)
        out = self.experts(grouped, share)
        target = out.new_empty(longer.shape)
        target[places, :] = out
        home = torch.ops.moesim_allocator.exchange(target[:-1])
        common = self.shared(x)
        unsorted = torch.zeros((rows, case.hidden), dtype=home.dtype, device=home.device)
        unsorted[order] = home
        unsorted = unsorted.reshape(-1, k, case.hidden)
        routed = torch.bmm(top.reshape(-1, 1, k), unsorted.float()).to(x.dtype).squeeze(1)
        return (common + routed).reshape(shape)


class PreNormLayer(nn.Module):  # type: ignore[misc]
    """A pre-norm layer."""

    def __init__(self, case: SmallModel, dense: bool) -> None:
        """Build both halves; `dense` layers have no experts."""
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(case.hidden), nn.RMSNorm(case.hidden)
        self.attention = LatentAttention(case) if case.mla else GroupedAttention(case)
        self.ffn: nn.Module = GatedFeedForward(case.hidden, case.ffn) if dense else RoutedLayer(case)

    def forward(self, x: torch.Tensor, wave: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        h = x + self.attention(self.attention_norm(x), wave)
        return h + self.ffn(self.ffn_norm(h))


class Model(nn.Module):  # type: ignore[misc]
    """Embedding, layers, norm and head; the first layer of a model with experts is dense."""

    def __init__(self, case: SmallModel) -> None:
        """Build all blocks."""
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.hidden)
        self.layers = nn.ModuleList(
            PreNormLayer(case, not case.experts or i == 0) for i in range(case.layers)
        )
        self.norm = nn.RMSNorm(case.hidden)
        self.head = nn.Linear(case.hidden, case.vocabulary, bias=False)
        width = 32 if case.mla else case.hidden // case.heads
        angles = torch.outer(torch.arange(case.sequence), 1e4 ** -torch.arange(0, 1, 2 / width)).float()
        self.register_buffer("wave", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map token numbers to logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.wave)
        return self.head(self.norm(x))


def checkpointed(layer: nn.Module, recompute: str) -> nn.Module:
    """Wrap a layer by its policy: `none`, `full`, or `op` (attention, exchanges, every second mm kept)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )
    from torch.utils import checkpoint as torch_checkpoint
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        create_selective_checkpoint_contexts,
    )

    if recompute == "none":
        return layer
    profiler = torch.ops.profiler  # marks of FSDP2, which its hooks do not repeat in the backward
    ignored = {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
    torch_checkpoint.SAC_IGNORED_OPS |= ignored
    if recompute == "full":
        return checkpoint_wrapper(layer, preserve_rng_state=False)
    aten = torch.ops.aten
    keep = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        torch.ops.moesim_allocator.exchange.default,
    }

    def contexts() -> Any:
        calls = {False: 0, True: 0}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = op in keep
            if op == aten.mm.default:
                calls[ctx.is_recompute] += 1
                kept = calls[ctx.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return checkpoint_wrapper(layer, context_fn=contexts, preserve_rng_state=False)


def sharded(case: SmallModel, device: str) -> nn.Module:
    """Build the model with FSDP2 over `case.ranks` ranks whose collectives move nothing.

    Buffers and streams are FSDP2's own. Experts are sharded over a group of ranks / ep members.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (case.ranks, 1), mesh_dim_names=("dp", "one"))
    mixed = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    with torch.device("meta"):
        model = Model(case)
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpointed(layer, case.recompute)
    shard = partial(fully_shard, mp_policy=mixed, reshard_after_forward=case.reshard)
    whole = partial(shard, mesh=mesh["dp"])
    whole(model.embedding)
    for layer in model.layers:
        inner = getattr(layer, "_checkpoint_wrapped_module", layer)
        if isinstance(inner.ffn, RoutedLayer):
            shard(inner.ffn.experts, mesh=mesh["one"] if case.ep == case.ranks else mesh["dp"])
        whole(layer)
    whole([model.norm, model.head], reshard_after_forward=False)
    whole(model)
    model.to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.trunc_normal_(p.to_local(), std=0.02) if hasattr(p, "to_local") else p.normal_(std=0.02)
        for buffer in model.buffers():
            buffer.zero_()
    return model
