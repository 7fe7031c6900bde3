"""Meaning of the arguments on number formats: the scenario's precision recipe."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.trainers.meaning.given import Given

FORMATS = {"fp32": "fp32", "fp16": "bf16", "bf16": "bf16", "fp8": "fp8"}
"""Format that a format of Megatron-LM is priced as; FP16 has the bytes and the rate of BF16."""

SCALING = {"delayed": "tensor", "tensorwise": "tensor", "blockwise": "tile", "mxfp8": "mx"}
"""Scaling that each value of --fp8-recipe is priced as."""

OFF = "none"
"""Value of `fp8-format` where a configuration switches it off."""

_ARGUMENTS = (
    "bf16", "fp16", "fp8-format", "fp8-recipe", "fp8-param-gather", "accumulate-allreduce-grads-in-fp32",
    "grad-reduce-in-bf16", "use-precision-aware-optimizer", "main-grads-dtype", "main-params-dtype",
    "exp-avg-dtype", "exp-avg-sq-dtype", "moe-dispatch-fwd-dtype", "moe-combine-bwd-dtype",
)  # fmt: skip


def read_precision(given: Given, fused_loss: bool, like_base: bool, base: Precision) -> None:
    """Set the precision recipe; `fused_loss` says that logits are not copied to FP32.

    `base` counts where a file that states a part says nothing, or only that FP8 is off where it is off.

    Raises InputError for training in FP32 and for unknown formats.
    """
    without_fp8 = given.text("fp8-format", "hybrid", ("e4m3", "hybrid", OFF)) == OFF
    if without_fp8 and base.linear == "bf16" and not given.has("bf16", "fp16"):
        given.explain("fp8-format", "base", "precision: without FP8, as the base's")
        return
    if like_base and not given.has("bf16", "fp16", "fp8-format"):
        for name in _ARGUMENTS:
            if given.has(name):
                given.explain(name, "base", "the file does not state the precision, so the base's counts")
        if not given.has(*_ARGUMENTS):
            given.explain("bf16", "base", "precision: the file does not state it, so the base's counts")
        return
    if not given.flag("bf16") and not given.flag("fp16") and not given.has("fp8-format"):
        raise InputError(
            "the file states neither --bf16 nor --fp16, so Megatron-LM trains in FP32, which is not "
            "modelled; add one of them"
        )
    if not like_base and not given.flag("bf16") and not given.flag("fp16"):
        raise InputError(
            f"{given.place('fp8-format')}: the rest is in FP32 without --bf16, which is not modelled; add it"
        )
    notes = ["FP16 has the cost of BF16"] if given.flag("fp16") else []
    fields = {**_linear(given, notes), **_optimizer(given, notes)}
    fields["loss"] = "bf16" if fused_loss else "fp32"
    recipe = Precision.model_validate(fields)
    stated = [name for name in _ARGUMENTS if given.has(name)]
    value: Any = next((name for name, known in PRECISIONS.items() if known == recipe), None)
    if value is None:
        value = recipe.model_dump(exclude_defaults=True)
    given.set("precision", value, *stated, note="; ".join(notes))


def _linear(given: Given, notes: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"linear": "bf16"}
    if given.has("fp8-format") and given.text("fp8-format", "hybrid", ("e4m3", "hybrid", OFF)) != OFF:
        recipe = given.text("fp8-recipe", "delayed", (*SCALING, "custom"))
        if recipe == "custom":
            raise InputError(f"{given.place('fp8-recipe')}: a recipe in code is not read; choose a named one")
        # Transformer Engine saves the quantised input of a linear layer for its weight gradient
        # (NVIDIA/TransformerEngine, transformer_engine/pytorch/module/linear.py and grouped_linear.py).
        fields |= {"linear": "fp8", "scaling": SCALING[recipe], "activation_cache": "fp8"}
        if not given.has("fp8-recipe"):
            notes.append("--fp8-recipe is delayed unless stated")
        if given.flag("fp8-param-gather"):
            fields |= {"parameters": "fp8", "parameter_gather": "fp8"}
    elif given.flag("fp8-param-gather"):
        raise InputError(f"{given.place('fp8-param-gather')}: needs --fp8-format too; add it")
    for name, key in (("moe-dispatch-fwd-dtype", "dispatch"), ("moe-combine-bwd-dtype", "combine")):
        chosen = given.text(name, "bf16")
        if chosen not in ("bf16", "fp8"):
            notes.append(f"--{name} {chosen} is priced as fp8")
        fields[key] = "bf16" if chosen == "bf16" else "fp8"
    if fields["combine"] != fields["dispatch"]:
        # The gradient that the backward of combine sends has the format of dispatch here.
        notes.append("the backward of combine counts as its dispatch")
        fields["combine"] = "bf16"
    return fields


def _optimizer(given: Given, notes: list[str]) -> dict[str, Any]:
    dtypes = ("fp32", "fp16", "bf16", "fp8")
    names = {"main-grads-dtype": ("fp32", "bf16"), "main-params-dtype": ("fp32", "fp16")}
    aware = given.flag("use-precision-aware-optimizer")
    chosen = {
        name: given.text(name, "fp32", names.get(name, dtypes))
        for name in ("main-grads-dtype", "main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
    }
    if not aware and set(chosen.values()) != {"fp32"}:
        stated = next(name for name, value in chosen.items() if value != "fp32")
        raise InputError(f"{given.place(stated)}: needs --use-precision-aware-optimizer too; add it")
    moments = {FORMATS[chosen["exp-avg-dtype"]], FORMATS[chosen["exp-avg-sq-dtype"]]}
    if len(moments) > 1:
        notes.append("the two moments have different formats, and both count as the larger one")
    half = given.flag("grad-reduce-in-bf16") or (
        chosen["main-grads-dtype"] != "fp32" and not given.flag("accumulate-allreduce-grads-in-fp32")
    )
    if given.flag("fp16") and not given.flag("accumulate-allreduce-grads-in-fp32"):
        half = True
    return {
        "master_weights": FORMATS[chosen["main-params-dtype"]],
        "gradients": "bf16" if half else "fp32",
        "gradient_reduce": "bf16" if half else "fp32",
        "moments": next(fmt for fmt in ("fp32", "bf16", "fp8") if fmt in moments),
    }
