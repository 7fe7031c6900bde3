"""The shipped models as rows: what they say, how they are searched, and what decoding keeps of a sequence."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import (
    MOST_SEARCHED,
    catalogue,
    context_text,
    load_model,
    pattern_text,
    row_of,
    search,
    shipped_models,
)
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.model.shape import state_sizes

LIST = Path(__file__).resolve().parents[3] / "lab" / "writers" / "model_files.csv"
BY_HAND = {
    "deepseek-v2-lite", "deepseek-v3", "llama-2-13b", "llama-2-70b", "llama-2-7b", "llama-3-70b",
    "llama-3-8b", "mixtral-8x22b", "mixtral-8x7b", "qwen2-57b-a14b", "qwen3-235b-a22b", "qwen3-30b-a3b",
}  # fmt: skip


def names(text: str) -> set[str]:
    return {row.name for row in search(catalogue(), text)}


def test_every_shipped_model_has_a_row_and_a_configuration() -> None:
    assert tuple(row.name for row in catalogue()) == shipped_models()
    with LIST.open(encoding="utf-8", newline="") as file:
        listed = [row["name"] for row in csv.DictReader(file)]
    assert len(listed) == len(set(listed))
    assert set(listed) | BY_HAND == set(shipped_models())
    assert len(shipped_models()) >= 30


def test_a_row_says_what_its_shape_is() -> None:
    row = row_of(load_model("deepseek-v3"))
    assert (row.parameters_total, row.layers, row.hidden) == (671_026_419_200, 61, 7168)
    assert row.attention == "61 mla"
    assert row.feed_forward == "3 dense, 58 moe"
    assert row.experts == "8 of 256, 1 shared"
    assert row.context == 163_840 and context_text(row.context) == "160 K"


def test_hybrid_models_count_layers_by_kind() -> None:
    nano = row_of(load_model("nemotron-3-nano-30b-a3b"))
    assert nano.attention == "23 mamba2, 6 gqa"
    assert nano.feed_forward == "23 moe"
    assert row_of(load_model("qwen3-next-80b-a3b")).attention == "36 gated_delta, 12 gqa"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek-v3", "3 dense/mla, 58 moe/mla"),
        ("qwen3-next-80b-a3b", "12 x (3 moe/linear, 1 moe/full)"),
        ("gpt-oss-20b", "12 x (1 moe/sliding, 1 moe/full)"),
    ],
)
def test_repeating_layers_are_written_once(name: str, text: str) -> None:
    assert pattern_text(load_model(name)) == text


def test_a_search_reads_names_kinds_experts_and_sizes() -> None:
    assert names("MLA deepseek") == {"deepseek-v2", "deepseek-v2-lite", "deepseek-v3"}
    assert "nemotron-3-nano-30b-a3b" in names("mamba2") and "qwen3-8b" not in names("mamba2")
    assert names("gated_delta <100B") == {"qwen3-next-80b-a3b", "qwen3.5-35b-a3b"}
    assert names(">1T") == {n for n in shipped_models() if parameters_total(load_model(n)) > 1e12}
    assert "mixtral-8x7b" not in names("active<10b") and "qwen3-30b-a3b" in names("active<10b")
    assert names("") == set(shipped_models())
    assert names("nomodelhasthisname") == set()


def test_a_long_search_is_refused() -> None:
    with pytest.raises(InputError, match=str(MOST_SEARCHED)):
        search(catalogue(), "x" * (MOST_SEARCHED + 1))


def test_states_grow_with_full_attention_only() -> None:
    by_kind = {size.kind: size for size in state_sizes(load_model("qwen3-next-80b-a3b"), (4096, 262_144))}
    full, linear = by_kind["gqa"], by_kind["gated_delta"]
    assert full.layers == 12 and full.bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert full.bytes_at[1] == pytest.approx(64 * full.bytes_at[0])
    assert (
        linear.layers == 36 and linear.bytes_per_token == 0 and linear.bytes_at[0] == linear.bytes_at[1] > 0
    )
    sliding = {size.kind: size for size in state_sizes(load_model("gpt-oss-20b"), (4096,))}["sliding"]
    assert sliding.bytes_per_token == 0.0
