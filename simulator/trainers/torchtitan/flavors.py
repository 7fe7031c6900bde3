"""The models that torchtitan ships, as sizes that a model of ours can be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesim.simulator.model.attention.gqa import GQA
from moesim.simulator.model.attention.mla import MLA
from moesim.simulator.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that identify a model; `latent` is the rank of MLA's keys and values, 0 for grouped queries."""

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    latent: int
    dense_ffn: int
    """0 where every layer has experts."""
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class Flavor:
    """One model of torchtitan: `family` is its package, `name` the flavor."""

    family: str
    name: str
    sizes: Sizes
    releases: frozenset[str] = frozenset({"0.2.2", "0.3.0"})


_OLD = frozenset({"0.2.2"})

# pytorch/torchtitan 0.2.2 and 0.3.0, torchtitan/models/*/__init__.py; the proof compares the parameters.
FLAVORS: Sequence[Flavor] = (
    Flavor("llama3", "8B", Sizes(32, 4096, 128256, 32, 8, 0, 14336)),
    Flavor("llama3", "70B", Sizes(80, 8192, 128256, 64, 8, 0, 28672)),
    Flavor("llama3", "405B", Sizes(126, 16384, 128256, 128, 8, 0, 53248)),
    Flavor("llama4", "17bx16e", Sizes(48, 5120, 202048, 40, 8, 0, 0, 16, 1, 8192, 8192), _OLD),
    Flavor("llama4", "17bx128e", Sizes(48, 5120, 202048, 40, 8, 0, 16384, 128, 1, 8192, 8192), _OLD),
    Flavor("deepseek_v3", "16B", Sizes(27, 2048, 102400, 16, 16, 512, 10944, 64, 6, 1408, 2816)),
    Flavor("deepseek_v3", "236B", Sizes(60, 5120, 102400, 128, 128, 512, 12288, 160, 6, 1536, 3072)),
    Flavor("deepseek_v3", "671B", Sizes(61, 7168, 129280, 128, 128, 512, 18432, 256, 8, 2048, 2048)),
    Flavor("qwen3", "8B", Sizes(36, 4096, 151936, 32, 8, 0, 12288)),
    Flavor("qwen3", "14B", Sizes(40, 5120, 151936, 40, 8, 0, 17408)),
    Flavor("qwen3", "32B", Sizes(64, 5120, 151936, 64, 8, 0, 25600)),
    Flavor("qwen3", "30B-A3B", Sizes(48, 2048, 151936, 32, 4, 0, 0, 128, 8, 768)),
    Flavor("qwen3", "235B-A22B", Sizes(94, 4096, 151936, 64, 4, 0, 0, 128, 8, 1536)),
)
"""The flavors of decoder-only language models that the simulator can describe."""


def flavor_of(shape: ModelShape, version: str) -> Flavor | None:
    """The flavor with the sizes of a model in one release, MTP modules left out; None if none is equal."""
    sizes = sizes_of(shape)
    return next((f for f in FLAVORS if f.sizes == sizes and version in f.releases), None)


def sizes_of(shape: ModelShape) -> Sizes | None:
    """Sizes of a model; None where it has features that no flavor has."""
    attention, moe = shape.attention, shape.moe
    if not shape.features <= {"gqa", "mla"}:
        return None
    if isinstance(attention, GQA):
        heads, latent = (attention.heads, attention.kv_heads), 0
    elif type(attention) is MLA:
        heads, latent = (attention.heads, attention.heads), attention.kv_lora_rank
    else:
        return None
    dense = 0 if moe is not None and not moe.dense_layers else shape.dense_ffn or 0
    if moe is None:
        return Sizes(shape.n_layers, shape.hidden, shape.vocab, *heads, latent, dense)
    return Sizes(
        *(shape.n_layers, shape.hidden, shape.vocab, *heads, latent, dense),
        *(moe.experts, moe.top_k, moe.expert_ffn, moe.shared_width),
    )
