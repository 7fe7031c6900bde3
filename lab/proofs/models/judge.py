"""Counts the parameters of Hugging Face models as transformers builds them, on the meta device.

    python lab/proofs/models/judge.py -o lab/docs/proof/model-parameters.json [CONFIGS...]

Runs in an environment with transformers and torch. Every config.json is built once as it is, and the first of
a family a few times with sizes drawn from a seed, without weights. The verdicts hold each model's keys, so
that a test can import the same model and compare. What transformers cannot build is written with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
from vary import deciding, variations

RENAMED = {
    "deepseek_ref": "deepseek_v4",
    "kimi_k2": "deepseek_v3",
    "minimax_m1": "minimax",
    "minimax_m3": "minimax_m3_vl_text",
}
"""Model types whose text model has another name in transformers; a flat file has no towers."""
TOWER = re.compile(r"visual|vision|audio|tower|multi_modal|mm_projector|embed_vision")
SEEDS = 5
COMPONENTS = (
    ("norms", r"attn_hc|ffn_hc|hc_head"),
    ("embedding", r"embed_tokens|embeddings|wte|wpe"),
    ("head", r"lm_head"),
    ("router", r"(?<!output_)gate\.weight|gate\.wg|router|e_score_correction_bias|moe_statics"),
    ("shared_experts", r"shared_expert|shared_mlp|latent_proj"),
    ("routed_experts", r"experts"),
    ("attention", r"attn|mamba|mixer\.(?!up_proj|down_proj)"),
    ("dense_ffn", r"mlp|feed_forward|up_proj|down_proj|ffn"),
)
"""Patterns of parameter names by component, the first match counts; norms are the rest."""
NORM = re.compile(r"norm|ln_[12f]|layernorm")


def main() -> None:
    """Write the verdicts of all configurations; without any, judge those of the last verdicts again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    verdicts: list[dict[str, Any]] = []
    varied: set[str] = set()
    for model in [read(path) for path in arguments.configs] or last(arguments.output):
        verdicts += judged(model, varied)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    lines = ",\n".join(json.dumps(verdict, sort_keys=True) for verdict in verdicts)
    head = json.dumps(versions)[:-1]
    arguments.output.write_text(f'{head}, "models": [\n{lines}\n]}}\n')
    built = sum("total" in verdict for verdict in verdicts)
    print(f"{built} of {len(verdicts)} models built, {arguments.output}")


def read(path: Path) -> dict[str, Any]:
    """Name, hash and deciding keys of a configuration file."""
    text = path.read_text()
    name = path.name.removesuffix(".json").removesuffix("_config")
    sha = hashlib.sha256(text.encode()).hexdigest()
    return {"name": name, "sha256": sha, "config": deciding(json.loads(text))}


def last(output: Path) -> list[dict[str, Any]]:
    """Name, hash and keys of the files behind the verdicts that are there, without the variations."""
    models = json.loads(output.read_text())["models"]
    return [
        {key: model[key] for key in ("name", "sha256", "config")} for model in models if "sha256" in model
    ]


def judged(model: dict[str, Any], varied: set[str]) -> list[dict[str, Any]]:
    """Verdicts of one file and, for the first file of a family, of variations of its sizes."""
    config, name = model["config"], model["name"]
    first = model | counted(config)
    family = config["model_type"]
    if "total" not in first or family in varied:
        return [first]
    varied.add(family)
    return [first] + [
        {"name": f"{name} seed {seed}", "config": sizes} | counted(sizes)
        for seed, sizes in variations(config, name, SEEDS)
    ]


def counted(config: dict[str, Any]) -> dict[str, Any]:
    """Total and counts by component of the language model, or the reason why there are none."""
    try:
        model = built(config)
    except Exception as error:
        return {"not_built": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    parts: Counter[str] = Counter()
    tensors = [*model.named_parameters()]
    tensors += [pair for pair in model.named_buffers() if "e_score_correction_bias" in pair[0]]
    for name, tensor in tensors:
        parts["tower" if TOWER.search(name) else component(name)] += tensor.numel()
    tower = parts.pop("tower", 0)
    return {"total": sum(parts.values()), "parts": dict(parts), "tower": tower}


def component(name: str) -> str:
    """Component of a parameter by its name."""
    if NORM.search(name) and not name.endswith("norm.bias_"):
        return "norms"
    return next((part for part, pattern in COMPONENTS if re.search(pattern, name)), "norms")


def built(config: dict[str, Any]) -> Any:
    """The model of a configuration on the meta device, without weights."""
    config = as_transformers_names(config)
    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    error: Exception | None = None
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
        try:
            with torch.device("meta"):
                return auto.from_config(parsed, trust_remote_code=False)
        except ValueError as failure:
            error = error or failure
    raise error or ValueError("no class")


def as_transformers_names(config: dict[str, Any]) -> dict[str, Any]:
    """The keys as transformers' class of the model names them, where the published file has its own."""
    config = config | {"pad_token_id": 0}  # the classes' own may lie outside of a varied vocabulary
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"pad_token_id": 0}
    else:
        config["model_type"] = RENAMED.get(config["model_type"], config["model_type"])
    if config["model_type"] == "minimax":
        kinds = {0: "linear_attention", 1: "full_attention"}
        config["layer_types"] = [kinds[kind] for kind in config.pop("attn_type_list")]
    if config["model_type"] == "dbrx":
        weight = config["ffn_config"].get("moe_normalize_expert_weights")
        config["ffn_config"] = config["ffn_config"] | {"moe_normalize_expert_weights": float(weight)}
    if config["model_type"] == "step3p7":
        config["n_routed_experts"] = config.pop("num_experts")
        config = {"model_type": "step3p7", "text_config": config}
    return config


if __name__ == "__main__":
    main()
