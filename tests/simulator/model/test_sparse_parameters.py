"""Parameters of the kinds of sparse attention against transformers 5.23 on the meta device."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from sparse_kinds import GLM5, M3, V32, v4_flash

from moesim.simulator.model.attention import DSA, GQA, MLA, Attention, Compressed
from moesim.simulator.model.block import head_parameters, site_parameters


@pytest.mark.parametrize(
    ("attention", "hidden", "parameters"),
    [
        (V32, 7168, 201_066_752),  # DeepseekV32ForCausalLM of DeepSeek-V3.2's config.json
        (GLM5, 6144, 174_394_112),  # GlmMoeDsaForCausalLM of GLM-5's
        (v4_flash(0), 4096, 106_956_352),  # DeepseekV4ForCausalLM of DeepSeek-V4-Flash's
        (v4_flash(4), 4096, 126_098_624),
        (v4_flash(128), 4096, 111_216_704),
        (M3, 6144, 110_887_424),  # MiniMaxM3VLTextModel's defaults
    ],
)
def test_parameters_equal_those_of_transformers(attention: Attention, hidden: int, parameters: int) -> None:
    assert attention.parameters(hidden) + attention.norm_parameters() == parameters


def test_a_layer_that_takes_another_choice_has_no_indexer() -> None:
    fields = V32.model_dump() | {"indexer": V32.indexer.model_dump() | {"shared": True}}
    shared = DSA.model_validate(fields)
    dense = MLA.model_validate({k: v for k, v in V32.model_dump().items() if k not in ("kind", "indexer")})
    assert shared.parameters(7168) == dense.parameters(7168)
    assert V32.parameters(7168) - dense.parameters(7168) == 7168 * (128 + 64) + 1536 * 8192 + 2 * 128


def test_block_sparse_is_grouped_query_attention_with_an_indexer() -> None:
    dense = GQA(heads=64, kv_heads=4, head_dim=128, qk_norm=True)
    assert dense.parameters(6144) + dense.norm_parameters() == 106_955_008
    assert M3.uncounted_parameters(6144) == 6144 * 5 * 128


def test_hyper_connections_count_as_in_transformers() -> None:
    assert site_parameters(4096, 4) == 393_243
    assert head_parameters(4096, 4) == 65_541
    assert site_parameters(4096, 1) == head_parameters(4096, 1) == 0


def test_contradictory_sizes_are_refused() -> None:
    with pytest.raises(ValidationError, match="does not divide heads"):
        Compressed.model_validate(v4_flash(0).model_dump() | {"o_groups": 7})
    with pytest.raises(ValidationError, match="no compressed keys"):
        Compressed.model_validate(v4_flash(4).model_dump() | {"ratio": 0})
