"""Files that are not a model's configuration, and configurations that contradict themselves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.huggingface import FAMILIES, import_hf, shape_from_config
from moesim.simulator.model.huggingface.reader import Reader

PROOF = Path(__file__).parents[3] / "lab" / "docs" / "proof" / "model-parameters.json"
CONFIGS: dict[str, dict[str, Any]] = {
    verdict["name"]: verdict["config"]
    for verdict in json.loads(PROOF.read_text())["models"]
    if "config" in verdict
}
GPT_OSS = "openai--gpt-oss-20b"
DEEPSEEK = "deepseek-ai--DeepSeek-V3"


def written(tmp_path: Path, data: object, name: str = "config.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(data))
    return path


OTHER_FILES: list[tuple[str, dict[str, Any]]] = [
    ("tokenizer's configuration", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}),
    ("tokenizer's configuration", {"added_tokens_decoder": {"0": {"content": "<s>"}}}),
    ("tokenizer's vocabulary", {"version": "1.0", "pre_tokenizer": None, "model": {"type": "BPE"}}),
    ("map of special tokens", {"bos_token": "<s>", "eos_token": "</s>"}),
    ("generation configuration", {"_from_model_config": True, "eos_token_id": 2}),
    ("generation configuration", {"do_sample": True, "temperature": 0.6, "top_p": 0.95}),
    ("preprocessor", {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5]}),
    ("preprocessor", {"processor_class": "Gemma4Processor"}),
    ("index of safetensors", {"metadata": {"total_size": 1}, "weight_map": {"a": "b"}}),
    ("adapter", {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": "x"}),
    ("quantisation section", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}),
    ("quantisation section", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ("diffusers", {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.21.0", "in_channels": 4}),
    ("DeepSpeed", {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}),
    ("trainer's state", {"global_step": 1, "log_history": []}),
    ("encoder", {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768}),
    ("encoder and decoder", {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512}),
]  # fmt: skip


@pytest.mark.parametrize(("title", "data"), OTHER_FILES)
def test_files_beside_a_config_are_named(title: str, data: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, data, "x.json")
    for read in (import_hf, load_model):
        with pytest.raises(InputError, match=title) as caught:
            read(path)
        said = str(caught.value)
        assert "\n" not in said and said.startswith(str(path))


CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    (GPT_OSS, {"num_hidden_layers": 25}, "layer_types has 24 entries but the model has 25 layers"),
    (GPT_OSS, {"layer_types": ["full_attention"] * 23 + ["conv"]}, "layer 23 is 'conv'.*sliding_attention"),
    (GPT_OSS, {"layer_types": None}, "layer_types=null must be a list"),
    (GPT_OSS, {"layer_types": [["full_attention"]] * 24}, "layer 0 is"),
    (GPT_OSS, {"layer_types": "full_attention"}, "must be a list"),
    (GPT_OSS, {"sliding_window": None}, "sliding_window=null"),
    (DEEPSEEK, {"first_k_dense_replace": 3, "mlp_layer_types": ["sparse"] * 61}, "contradict each other"),
    (DEEPSEEK, {"hidden_act": "gelu"}, "hidden_act='gelu' is not modelled"),
    (DEEPSEEK, {"topk_group": 9}, "topk_group=9 is above n_group=8"),
    ("zai-org--GLM-5.2", {"indexer_types": ["full"] * 77 + ["none"]}, "layer 77 is 'none'"),
    ("zai-org--GLM-5.2", {"indexer_types": None, "index_topk_freq": 4}, "index_topk_freq=4"),
    (
        "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {"num_hidden_layers": 51},
        "pattern of the layers has 52",
    ),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"hybrid_override_pattern": "MX"}, "layer 1 is 'X'"),
    ("deepseek-ai--DeepSeek-V4-Flash", {"compress_ratios": [3] * 44}, "layer 0 is 3, which is not modelled"),
    ("google--gemma-4-26B-A4B", {"text_config.num_kv_shared_layers": 4}, "layers that share keys and values"),
    ("google--gemma-4-26B-A4B", {"text_config.layer_types": ["full_attention"]}, "has 1 entries"),
    ("moonshotai--Kimi-Linear-48B-A3B-Instruct", {"num_hidden_layers": 26}, "names layer 27"),
    ("meituan-longcat--LongCat-Flash-Chat", {"zero_expert_type": "noise"}, "zero_expert_type='noise'"),
    ("Qwen--Qwen3-Next-80B-A3B-Instruct", {"linear_num_key_heads": ...}, "linear_num_key_heads is missing"),
    ("Qwen--Qwen3.5-35B-A3B", {"text_config.hidden_size": 2048.5}, "text_config.hidden_size=2048.5"),
    ("tencent--Hunyuan-A13B-Instruct", {"moe_topk": [8] * 31 + [4]}, "must repeat one number"),
]


@pytest.mark.parametrize(("name", "change", "words"), CONTRADICTIONS)
def test_contradictions_are_refused_in_one_sentence(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    data = json.loads(json.dumps(CONFIGS[name]))
    for key, value in change.items():
        inner = data["text_config"] if key.startswith("text_config.") else data
        inner[key.removeprefix("text_config.")] = value
        if value is ...:
            del inner[key.removeprefix("text_config.")]
    with pytest.raises(InputError, match=words) as caught:
        import_hf(written(tmp_path, data))
    assert "\n" not in str(caught.value)


_AT_FAULT: tuple[Any, ...] = (..., None, -1, "x", [], {}, 10**30, True, 0)
"""Values of other kinds; the first stands for a key that is not there."""


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith("seed 0")])
def test_every_key_at_fault_is_a_refusal_or_a_model(name: str) -> None:
    """No key of any family, taken away or with a value of another kind, ends in anything but these two."""
    text = json.dumps(CONFIGS[name])
    outer = json.loads(text)
    for key in outer.get("text_config", outer):
        for value in _AT_FAULT:
            data = json.loads(text)
            part = data.get("text_config", data)
            part.pop(key) if value is ... else part.update({key: value})
            try:
                shape_from_config(data, "config.json")
            except InputError as error:
                assert "\n" not in str(error)


def test_an_unknown_family_is_told_by_its_keys() -> None:
    """Every published file under a new name is read as its own family, or as one with the same keys."""
    told: Counter[str] = Counter()
    for name, config in CONFIGS.items():
        if " seed " in name:
            continue
        data = json.loads(json.dumps(config)) | {"model_type": "new", "architectures": ["NewForCausalLM"]}
        if "text_config" in data:
            data["text_config"] |= {"model_type": "new_text", "architectures": None}
        known = shape_from_config(json.loads(json.dumps(config)), f"{name}.json").shape
        with pytest.raises(InputError, match="--as") as caught:
            shape_from_config(data, f"{name}.json")
        family = str(caught.value).partition("write --as ")[2].partition(";")[0]
        assert family in FAMILIES
        renamed = shape_from_config(data, f"{name}.json", as_family=family).shape
        left_out = {"source", "not_modelled"}
        told[
            "same" if renamed.model_dump(exclude=left_out) == known.model_dump(exclude=left_out) else name
        ] += 1
    assert told["same"] >= 0.75 * sum(told.values()), told


def test_the_architecture_decides_over_the_model_type() -> None:
    data = CONFIGS[DEEPSEEK] | {"model_type": "brand_new", "architectures": ["DeepseekV3ForCausalLM"]}
    known = shape_from_config(dict(CONFIGS[DEEPSEEK]), "config.json").shape
    assert shape_from_config(dict(data), "config.json").shape.moe == known.moe
    kimi = CONFIGS["moonshotai--Kimi-K2-Instruct"]
    assert kimi["architectures"] == ["DeepseekV3ForCausalLM"] and kimi["model_type"] == "kimi_k2"
    assert shape_from_config(dict(kimi), "config.json").shape.name.startswith("kimi_k2")


def test_reading_is_linear_in_the_size_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that decide nothing are not read: a file of 100 kB and more takes as many reads as a small one."""
    reads: list[str] = []
    take = Reader.take

    def counting(self: Reader, keys: tuple[str, ...], *rest: Any, **more: Any) -> Any:
        reads.append(keys[0])
        return take(self, keys, *rest, **more)

    monkeypatch.setattr(Reader, "take", counting)
    config = CONFIGS["zai-org--GLM-5.2"]
    import_hf(written(tmp_path, config))
    small = len(reads)
    reads.clear()
    padding = {f"model.layers.{i}.self_attn.q_proj": {"num_bits": 4, "group_size": 16} for i in range(2500)}
    path = written(tmp_path, config | {"quantization_config": {"config_groups": padding}})
    assert path.stat().st_size > 150_000
    imported = import_hf(path)
    assert len(reads) == small and "quantization_config" in imported.ignored


@pytest.mark.parametrize("name", ["deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-V3.2"])
def test_mtp_modules_are_not_taken_to_be_absent(name: str) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if key != "num_nextn_predict_layers"}
    with pytest.raises(InputError, match="num_nextn_predict_layers or num_mtp_layers is missing"):
        shape_from_config(config, "config.json")
