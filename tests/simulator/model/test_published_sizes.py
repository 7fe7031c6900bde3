"""Counted parameters of every shipped model beside the published ones, by the publisher's rule."""

from __future__ import annotations

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.counts import (
    ACTIVATED_LIMIT,
    TOTAL_LIMIT,
    PublishedCount,
    PublishedSize,
    compare_activated,
    compare_total,
    published_sizes,
)


def count(**keys: object) -> PublishedCount:
    return validate_model(PublishedCount, keys, "test")


def test_every_shipped_model_has_a_published_size_and_no_other() -> None:
    assert set(published_sizes()) == set(shipped_models())
    assert (TOTAL_LIMIT, ACTIVATED_LIMIT) == (0.005, 0.02)


@pytest.mark.parametrize("name", shipped_models())
def test_the_counts_agree_with_the_published_ones(name: str) -> None:
    shape, size = load_model(name), published_sizes()[name]
    total, activated = compare_total(shape, size), compare_activated(shape, size)
    assert total.agrees, f"{total.counted:,} for {size.total.value}: {total.error:+.2%}"
    dense = shape.moe is None
    assert (activated is None) == (dense or bool(size.activated_left_out))
    assert not (dense and size.activated_left_out)
    if activated is not None:
        assert activated.agrees, (
            f"{activated.counted:,} for {activated.published.value}: {activated.error:+.2%}"
        )


def test_an_activated_figure_is_left_out_for_a_reason_or_given() -> None:
    size = {"model": "toy", "total": {"value": "16B"}, "source": "a report", "date": "2024-05"}
    reason = {"activated_left_out": "no rule reproduces 2.4B"}
    assert validate_model(PublishedSize, size | reason, "test").activated is None
    with pytest.raises(InputError, match="leave one of them out"):
        validate_model(PublishedSize, size | reason | {"activated": {"value": "2.4B"}}, "test")


def test_few_activated_figures_are_left_out() -> None:
    left_out = [name for name, size in published_sizes().items() if size.activated_left_out]
    assert left_out == ["deepseek-v2-lite"]


def test_most_totals_are_compared_to_three_digits() -> None:
    """A figure such as 1T says little: two of three totals are held to 0.5 %."""
    sizes = published_sizes().values()
    sharp = [s for s in sizes if s.total.limit(TOTAL_LIMIT) <= TOTAL_LIMIT * s.total.parameters * 1.02]
    assert len(sharp) >= 2 / 3 * len(sizes)


@pytest.mark.parametrize(
    ("keys", "limit"),
    [
        ({"value": "671B"}, 0.005 * 671e9),
        ({"value": "30.5B"}, 0.005 * 30.5e9),
        ({"value": "80B"}, 0.5e9),  # two digits: half of the last one
        ({"value": "3.3B"}, 0.05e9),
        ({"value": "0.8B"}, 0.05e9),
        ({"value": "1T"}, 0.5e12),
        ({"value": "30B", "rounded_to": "10B"}, 5e9),
    ],
)
def test_the_limit_is_half_a_percent_or_the_rounding_of_a_short_figure(
    keys: dict[str, str], limit: float
) -> None:
    assert count(**keys).limit(TOTAL_LIMIT) == pytest.approx(limit)


def test_parts_outside_the_language_model_are_taken_off() -> None:
    assert count(value="109B", outside="0.87B").parameters == pytest.approx(108.13e9)


def test_what_a_figure_includes_decides_the_count() -> None:
    shape = load_model("glm-4.5")
    size = published_sizes()["glm-4.5"]
    own = compare_total(shape, size).counted
    with_tables = size.model_copy(update={"total": count(value="355B", counts=["embedding", "head", "mtp"])})
    without_mtp = size.model_copy(update={"total": count(value="355B", counts=[])})
    table = shape.vocab * shape.hidden
    assert compare_total(shape, with_tables).counted == own + 2 * table
    assert compare_total(shape, without_mtp).counted < own - 3e9
    assert not compare_total(shape, with_tables).agrees


def test_an_indexer_may_be_left_out_and_a_tied_table_counts_once() -> None:
    v32, size = load_model("deepseek-v3.2"), published_sizes()["deepseek-v3.2"]
    whole = size.model_copy(update={"total": count(value="671B")})
    assert 0.8e9 < compare_total(v32, whole).counted - compare_total(v32, size).counted < 0.9e9
    gemma, size = load_model("gemma-4-26b-a4b"), published_sizes()["gemma-4-26b-a4b"]
    either = [
        compare_total(gemma, size.model_copy(update={"total": count(value="25.2B", counts=counts)})).counted
        for counts in (["embedding"], ["head"], ["embedding", "head"])
    ]
    assert gemma.tied_embeddings and len(set(either)) == 1


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"value": "many"}, "value"),
        ({"value": "671 B"}, "value"),
        ({"value": "35B", "rounded_to": "10B"}, "no multiple"),
        ({"value": "671B", "rounded_to": "1B"}, "three digits"),
        ({"value": "671B", "counts": ["vision"]}, "counts"),
    ],
)
def test_a_figure_that_says_nothing_is_refused(keys: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        count(**keys)
