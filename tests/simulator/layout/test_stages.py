from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.layout.stages import (
    Block,
    balanced,
    blocks_of,
    describe,
    from_layers_per_stage,
)
from moesim.simulator.model.catalogue import load_model

V3 = blocks_of(load_model("deepseek-v3"))


def test_blocks_of_deepseek_v3() -> None:
    kinds = [b.kind for b in V3]
    assert kinds == ["embedding"] + ["dense"] * 3 + ["moe"] * 58 + ["head", "mtp", "head"]
    assert V3[-2:] == (Block("mtp", 61), Block("head", 61))
    assert [b.layer for b in V3[1:62]] == list(range(61))


def brute_force(body: list[int], first: int, last: int, k: int) -> tuple[int, ...]:
    """Every contiguous cut, by the stated order of preference; the first and the last stage may be empty."""
    best: tuple[int, int, tuple[int, ...]] | None = None
    for cuts in combinations_with_replacement(range(len(body) + 1), k - 1):
        ends = [0, *cuts, len(body)]
        if any(a == b for a, b in pairwise(ends[1:-1])):
            continue
        loads = [sum(body[a:b]) for a, b in pairwise(ends)]
        loads[0] += first
        loads[-1] += last
        key = (
            max(loads),
            sum(x * x for x in loads),
            tuple(b - a for a, b in pairwise(ends)),
        )
        best = key if best is None else min(best, key)
    assert best is not None
    return best[2]


@settings(max_examples=60)
@given(st.data())
def test_balanced_equals_brute_force(data: st.DataObject) -> None:
    body = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    first, last = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    k = data.draw(st.integers(1, len(body) + 2))
    blocks = [Block("embedding"), *(Block("moe", i) for i in range(len(body))), Block("head")]
    got = balanced(blocks, [float(first), *map(float, body), float(last)], k)
    assert sum(got.stages, ()) == tuple(blocks)
    assert got.layers_per_stage == brute_force(body, first, last, k)


def test_embedding_first_and_heads_last() -> None:
    weights = [5.0 if b.kind == "head" else 1.0 for b in V3]
    assignment = balanced(V3, weights, 16)
    assert assignment.stages[0][0].kind == "embedding"
    assert {i for i, stage in enumerate(assignment.stages) for b in stage if b.kind in ("head", "mtp")} == {
        15
    }
    assert [b.kind for b in assignment.stages[-1]][-3:] == ["head", "mtp", "head"]
    assert assignment.layers_per_stage[-1] == 0, "the heads outweigh every other stage"
    assert sum(assignment.layers_per_stage) == 61


def test_explicit_sizes_round_trip_and_describe() -> None:
    sizes = (4,) * 15 + (1,)
    assignment = from_layers_per_stage(V3, sizes)
    assert assignment.layers_per_stage == sizes
    lines = describe(assignment).splitlines()
    assert lines[0] == "stage 0: embedding + 3 dense + 1 moe"
    assert lines[15] == "stage 15: 1 moe + head + mtp + head"
    # a stage of nothing but the tail is legal
    assert from_layers_per_stage(V3, (31, 30, 0)).stages[-1][0].kind == "head"


@pytest.mark.parametrize("sizes", [(4,) * 16, (), (-1, 62)])
def test_illegal_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="layers_per_stage"):
        from_layers_per_stage(V3, sizes)


def test_illegal_weights_and_counts() -> None:
    with pytest.raises(InputError, match="weights"):
        balanced(V3, [1.0], 4)
    with pytest.raises(InputError, match="finite"):
        balanced(V3, [float("nan")] * len(V3), 4)
    with pytest.raises(InputError, match=r"64 pipeline stages: .* from 1 to 63"):
        balanced(V3, [1.0] * len(V3), 64)


def test_embedding_and_head_may_stand_alone() -> None:
    heavy = [{"head": 9.0, "embedding": 0.0}.get(b.kind, 1.0) for b in V3]
    assert balanced(V3, heavy, 8).layers_per_stage[-1] == 0
    assert balanced(V3, [1.0] * len(V3), 63).layers_per_stage == (0, *(1,) * 61, 0)
    assert balanced(V3, heavy, 62).layers_per_stage == (*(1,) * 61, 0)


def test_mtp_modules_may_have_a_stage_of_their_own() -> None:
    for mtp in (-2, 2):
        stages = from_layers_per_stage(V3, (31, 30, 0, 0), mtp).stages
        assert [[b.kind for b in stage] for stage in stages[2:]] == [["mtp"], ["head", "head"]]
    assert from_layers_per_stage(V3, (31, 30, 0, 0), 1).stages[1][-1].kind == "mtp"
    assert from_layers_per_stage(V3, (31, 30), -1) == from_layers_per_stage(V3, (31, 30))
    for wrong in (0, 4, -4):
        with pytest.raises(InputError, match=rf"stages.mtp={wrong} is not one of the stages 1 to 3"):
            from_layers_per_stage(V3, (31, 30, 0, 0), wrong)
    llama = blocks_of(load_model("llama-3-8b"))
    with pytest.raises(InputError, match="no MTP modules"):
        from_layers_per_stage(llama, (32, 0), 0)
