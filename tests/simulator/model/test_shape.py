from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import dump_mapping
from moesim.simulator.model.attention import MLA
from moesim.simulator.model.catalogue import load_model, shipped_models
from moesim.simulator.model.counts import parameters_total
from moesim.simulator.model.huggingface import to_yaml
from moesim.simulator.model.shape import ModelShape


@pytest.mark.parametrize("name", shipped_models())
def test_shipped_model_has_provenance_and_round_trips(name: str, tmp_path: Path) -> None:
    shape = load_model(name)
    assert shape.name == name
    assert shape.source.kind == "published"
    assert shape.source.date != "undated"
    path = tmp_path / "model.yaml"
    path.write_text(to_yaml(shape))
    assert load_model(path) == shape
    assert load_model(str(path)) == shape


def test_deepseek_v3_layers() -> None:
    shape = load_model("deepseek-v3")
    assert [shape.is_moe_layer(i) for i in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert sum(map(shape.is_moe_layer, range(shape.n_layers))) == 58 == shape.n_layers - 3
    with pytest.raises(InputError, match="no layer 62"):
        shape.is_moe_layer(62)
    assert isinstance(shape.attention, MLA)
    assert shape.attention.sizes == (128, 128, 192, 128)


def edited(**changes: Any) -> dict[str, Any]:
    data = load_model("deepseek-v3").model_dump(mode="json", exclude_none=True)
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = data
        for parent in parents:
            target = target[parent]
        if value is None:
            del target[key]
        else:
            target[key] = value
    return data


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hiden": 7168}, "hidden"),
        ({"hidden": None}, "hidden"),
        ({"hidden": "7168"}, "hidden"),
        ({"hidden": True}, "hidden"),
        ({"n_layers": 0}, "n_layers"),
        ({"n_layers": 10**9}, "n_layers"),
        ({"dense_ffn": None}, "dense_ffn"),
        ({"moe__groups": 7}, "groups=7 does not divide experts=256"),
        ({"moe__groups_per_token": 9}, "groups_per_token=9"),
        ({"moe__top_k": 200}, "top_k=200"),
        ({"moe__group_score": None}, "group_score"),
        ({"moe__group_score": "sum"}, "top2-sum"),
        ({"moe__shared_ffn": None}, "shared_ffn"),
        ({"moe__dense_layers": [0, 61]}, "61"),
        ({"moe__dense_layers": [1, 0]}, "dense_layers"),
        ({"attention__kind": "mha"}, "mha"),
        ({"attention__v_dim": None}, "v_dim"),
    ],
)
def test_bad_model_file_names_file_and_key(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(dump_mapping(edited(**changes)))
    with pytest.raises(InputError) as caught:
        load_model(path)
    assert "broken.yaml" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(InputError, match=r"deepseek-v9.*nearest: 'deepseek-v[23]'.*moesim models"):
        load_model("deepseek-v9")


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.json"):
        load_model(tmp_path / "gone.json")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(InputError, match="empty"):
        load_model(tmp_path / "empty.yaml")


def test_shape_is_frozen_and_hashable() -> None:
    shape = load_model("deepseek-v3")
    assert hash(shape) == hash(ModelShape.model_validate(shape.model_dump()))
    with pytest.raises(ValueError, match="frozen"):
        shape.hidden = 1  # type: ignore[misc]


NARROW = {"kind": "gqa", "heads": 32, "kv_heads": 2, "head_dim": 128}
BY_LAYER = {
    "attentions": {"narrow": NARROW, "full": NARROW | {"kv_heads": 8}},
    "attention_layers": ["narrow*3", "full"],
}


def by_layer(**changes: Any) -> dict[str, Any]:
    data = load_model("llama-3-8b").model_dump(mode="json", exclude_none=True)
    del data["attention"]
    return {key: value for key, value in (data | BY_LAYER | changes).items() if value is not None}


def test_layers_may_differ_in_their_attention() -> None:
    shape = ModelShape.model_validate(by_layer())
    assert shape.layer_counts == {"dense/narrow": 24, "dense/full": 8}
    assert shape.main_layer_kind == "dense/narrow"
    assert [shape.layers[i].attention.model_dump()["kv_heads"] for i in (2, 31)] == [2, 8]
    assert ModelShape.model_validate(shape.model_dump()) == shape
    assert hash(ModelShape.model_validate(shape.model_dump())) == hash(shape)
    with pytest.raises(
        InputError, match="no block of kind 'dense'; it has embedding, dense/narrow, dense/full"
    ):
        shape.block("dense")


def test_a_module_for_further_tokens_has_the_attention_of_the_last_layer() -> None:
    shape = ModelShape.model_validate(by_layer(mtp_layers=1))
    layer = shape.block("mtp").layer
    assert layer is not None and layer == shape.layers[-1]
    with pytest.raises(InputError, match="no MTP modules"):
        load_model("llama-3-8b").block("mtp")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": NARROW}, "leave out attentions"),
        ({"attentions": None}, "attention is missing"),
        ({"attentions": {}}, "attention is missing"),
        ({"attention_layers": None}, "attention_layers is missing"),
        ({"attention_layers": []}, "no layer of attention_layers has 'narrow'"),
        ({"attention_layers": ["narrow"]}, "'full'"),
        ({"attention_layers": ["narrow", "wide"]}, "names 'wide'"),
        ({"attention_layers": ["narrow*2", "full"]}, "3 entries, which do not repeat to 32 layers"),
        ({"attention_layers": ["narrow*1000"] * 1000}, "1000000 entries, which do not repeat to 32 layers"),
        ({"attention_layers": ["narrow*x", "full"]}, r"'narrow*x' is no name with a count"),
        ({"attention_layers": ["narrow*0", "full"]}, r"'narrow*0'"),
        ({"attentions": {"nar/row": NARROW}}, "nar/row"),
        ({"attentions": BY_LAYER["attentions"] | {"full": {"kind": "mha"}}}, "attentions.full"),  # type: ignore[operator]
        ({"attentions": BY_LAYER["attentions"] | {"full": NARROW | {"heds": 3}}}, "attentions.full.heds"),  # type: ignore[operator]
    ],
)
def test_bad_attention_by_layer_is_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_model(ModelShape, by_layer(**changes), "model.yaml")
    assert words in str(caught.value) and "\n" not in str(caught.value)


HYBRID: dict[str, object] = {
    "name": "hybrid",
    "source": {"kind": "assumed", "reference": "a test"},
    "n_layers": 4,
    "hidden": 64,
    "vocab": 100,
    "attentions": {"full": {"kind": "gqa", "heads": 4, "kv_heads": 2, "head_dim": 16}},
    "attention_layers": ["full", "none", "full", "none"],
    "dense_ffns": {"wide": 256},
    "ffn_layers": ["none", "moe", "wide", "moe"],
    "moe": {"experts": 8, "top_k": 2, "expert_ffn": 32, "scoring": "softmax"},
    "tied_embeddings": True,
}


def test_layers_may_lack_a_half() -> None:
    shape = validate_model(ModelShape, HYBRID, "model.yaml")
    assert shape.layer_kinds == ("none/full", "moe/none", "wide/full", "moe/none")
    assert [shape.is_moe_layer(i) for i in range(4)] == [False, True, False, True]
    only_attention, only_experts = shape.block("none/full").layer, shape.block("moe/none").layer
    assert only_attention is not None and only_experts is not None
    assert only_attention.norms == only_experts.norms == 1
    attention = 64 * (64 + 2 * 32) + 64 * 64
    layers = 2 * attention + 2 * (8 * 3 * 64 * 32 + 8 * 64) + 3 * 64 * 256 + 5 * 64
    assert parameters_total(shape) == 100 * 64 + 64 + layers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_layers": ["none"]}, "no layer of attention_layers has 'full'"),
        ({"ffn_layers": ["none", "moe"]}, "no layer of ffn_layers has 'wide'"),
        ({"ffn_layers": None}, "ffn_layers is missing"),
        ({"ffn_layers": ["none", "moe", "wide", "dense"]}, "names 'dense'; the model has moe, wide"),
        ({"dense_ffns": {"moe": 256}}, "'moe' means something else"),
        ({"mtp_layer": "moe/full"}, "mtp_layers is 0"),
        ({"mtp_layers": 1, "mtp_layer": "moe/narrow"}, "no block of kind 'moe/narrow'"),
        ({"mtp_layers": 1, "mtp_layer": "none/none"}, "no block of kind 'none/none'"),
    ],
)
def test_bad_layer_patterns_are_told(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_model(ModelShape, {**HYBRID, **changes}, "model.yaml")
    assert words in str(caught.value) and "\n" not in str(caught.value)
