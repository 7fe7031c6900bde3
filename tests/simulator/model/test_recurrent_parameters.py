"""Parameters of recurrent mixers against the modules of transformers, built on the meta device."""

from __future__ import annotations

import pytest

from moesim.simulator.model.attention import KDA, Attention, GatedDelta, Lightning, Mamba, Mamba2

COUNTS = {
    # transformers 5.23.0: parameters of one mixer module, from the published config.json of each model;
    # Jamba's with mamba_dt_rank 512, MiniMax's with 64 heads of 128 at hidden size 6,144.
    "Qwen3.5-35B-A3B, as Qwen3-Next": (
        2048,
        GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        33_718_464,
    ),
    "Qwen3.5-122B-A10B": (
        3072,
        GatedDelta(key_heads=16, value_heads=64, key_dim=128, value_dim=128),
        88_523_008,
    ),
    "Qwen3.5-397B-A17B": (
        4096,
        GatedDelta(key_heads=16, value_heads=64, key_dim=128, value_dim=128),
        118_014_208,
    ),
    "Nemotron 3 Nano": (2688, Mamba2(heads=64, head_dim=64, groups=8, state=128), 38_742_208),
    "Nemotron 3 Super": (4096, Mamba2(heads=128, head_dim=64, groups=8, state=128), 109_635_968),
    "Nemotron 3 Ultra": (8192, Mamba2(heads=256, head_dim=64, groups=8, state=128), 421_636_864),
    "Nemotron-H-56B": (8192, Mamba2(heads=256, head_dim=64, groups=8, state=256), 438_424_320),
    "Jamba 1.5 Large": (
        8192,
        Mamba(inner=16_384, state=16, dt_rank=512, inner_norms=True),
        420_332_064,
    ),
    "MiniMax-M1": (6144, Lightning(heads=64, kv_heads=64, head_dim=128), 251_666_432),
    "Kimi Linear": (2304, KDA(heads=32, head_dim=128), 39_514_272),
    "Ling 3.0 Flash": (
        2560,
        KDA(heads=32, head_dim=128, full_rank_gate=True, full_rank_decay=True),
        63_049_888,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_those_of_the_published_modules(name: str) -> None:
    hidden, mixer, published = COUNTS[name]
    assert mixer.parameters(hidden) + mixer.norm_parameters() == published


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            GatedDelta,
            {"key_heads": 3, "value_heads": 8, "key_dim": 4, "value_dim": 4},
            "key_heads=3 does not divide value_heads=8",
        ),
        (Mamba2, {"heads": 6, "head_dim": 4, "groups": 4, "state": 8}, "groups=4 does not divide heads=6"),
        (Lightning, {"heads": 6, "kv_heads": 4, "head_dim": 8}, "kv_heads=4 does not divide heads=6"),
    ],
)
def test_groups_of_heads_must_divide(kind: type[Attention], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.model_validate(sizes)
