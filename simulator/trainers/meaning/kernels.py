"""Meaning of the arguments on kernels, overlap, number formats and recomputation."""

from __future__ import annotations

from typing import Any

from moesim.hwmodels.errors import InputError
from moesim.simulator.dispatchers.registry import check_known, dispatcher
from moesim.simulator.model.precision import PRECISIONS, Precision
from moesim.simulator.model.recompute import MODULES
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.meaning.given import Given

DEEPEP = "deepep-2025-04"
"""Generation of DeepEP that stands for Megatron-LM's, unless the base names another."""

GRAPH_PARTS = {
    "attn": "attention",
    "moe_router": "router",
    "moe_preprocess": "router",
    "moe": "experts",
    "full": "layer",
    "full_iteration": "all",
}
"""Part of `software.cuda_graphs` for each module of --cuda-graph-modules."""


def read_dispatcher(given: Given, base: Scenario, ep: int, like_base: bool) -> None:
    """Set the kernels that move tokens to experts on other GPUs, and their SMs.

    Raises InputError where the base names a dispatcher that nobody knows.
    """
    check_known(base.communication.kernels, base.calibration)
    kind, backend = "moe-token-dispatcher-type", "moe-flex-dispatcher-backend"
    sms = [name for name in SM_ARGUMENTS if given.has(name)]
    if ep == 1:
        for name in (kind, backend, "moe-enable-deepep", *sms):
            if given.has(name):
                given.explain(name, "irrelevant", "no tokens leave the GPU with expert-parallel size 1")
        return
    if like_base and not given.has(kind, backend, "moe-enable-deepep"):
        # The file states only the SMs of the base's dispatcher, if anything.
        if sms and dispatcher(base.communication.kernels).by_library:
            raise InputError(
                f"{given.place(sms[0])}: are SMs of DeepEP or HybridEP, and the file does not state a "
                f"dispatcher where the base has {base.communication.kernels}; state "
                f"--moe-token-dispatcher-type, or give --ignore {given.stated[sms[0]].written}"
            )
        if sms:
            given.set("communication.sms", given.integer(sms[0], 20, least=0, most=10_000), *sms)
        return
    chosen = given.text(kind, "flex" if like_base else "allgather", ("allgather", "alltoall", "flex"))
    if chosen != "flex":
        given.set("communication.kernels", "nccl-allgather" if chosen == "allgather" else "nccl", kind)
        for name in (backend, *sms):
            if given.has(name):
                given.explain(name, "irrelevant", f"Megatron-LM does not read it with --{kind} {chosen}")
        return
    named = dispatcher(base.communication.kernels).words.get("megatron") == "deepep"
    kernels = base.communication.kernels if named else DEEPEP
    engine = given.text(backend, "deepep", ("deepep", "hybridep", "ncclep"))
    kernels = "hybridep" if engine == "hybridep" else kernels
    given.set("communication.kernels", kernels, kind, backend, "moe-enable-deepep")
    if engine == "ncclep":
        given.explain(backend, "not priced", f"the direction is unknown: {engine} is priced as DeepEP")
    fused = "moe-permute-fusion-into-hybridep"
    if engine == "hybridep" and given.flag(fused):
        given.set("communication.fused_permutation", True, fused)
    elif given.has(fused):
        given.explain(fused, "irrelevant", f"Megatron-LM does not read it with --{backend} {engine}")
    own = {"deepep": SM_ARGUMENTS[:2], "hybridep": SM_ARGUMENTS[1:], "ncclep": SM_ARGUMENTS[1:2]}[engine]
    stated = [name for name in own if given.has(name)]
    if stated or not like_base:
        usual = 16 if engine == "hybridep" else 20
        number = given.integer(stated[0], usual, least=0, most=10_000) if stated else usual
        given.set("communication.sms", number, *(stated or own))


SM_ARGUMENTS = ("moe-deepep-num-sms", "moe-flex-dispatcher-num-sms", "moe-hybridep-num-sms")


def read_routing(given: Given, experts: bool) -> None:
    """Set what the arguments say about the load of experts; placement of replicas is not Megatron-LM's."""
    per = {"moe-expert-capacity-factor": "expert", "moe-expert-rank-capacity-factor": "rank"}
    for name, unit in per.items():
        if not given.has(name):
            continue
        factor = given.number(name, 0.0)
        if factor < 0:
            given.explain(name, "irrelevant", "a negative factor drops nothing")
        else:
            given.set("routing.capacity", {"factor": factor, "per": unit}, name)
    balanced = "moe-router-force-load-balancing"
    if given.flag(balanced) and experts:
        given.set("routing.expert_load_cv", 0.0, balanced, note="every expert gets the same number of tokens")
    if experts and not given.flag("moe-grouped-gemm") and not given.in_part:
        text = "the real step is slower: without it the experts of a GPU run one after another, not grouped"
        given.explain("moe-grouped-gemm", "not priced", text)
    elif given.has("moe-grouped-gemm"):
        text = "experts of a GPU run as grouped GEMMs, as moesim prices them"
        given.explain("moe-grouped-gemm", "key", text)


def fused_loss(given: Given) -> str:
    """The scenario's software.loss: fused, compiled or chain."""
    if not given.flag("cross-entropy-loss-fusion"):
        return "chain"
    kind = given.text("cross-entropy-fusion-impl", "native", ("native", "te"))
    return "fused" if kind == "te" else "compiled"


def read_software(given: Given, base: Scenario, tp: int, cp: int, like_base: bool) -> None:
    """Set the keys of the section software."""
    if not like_base or given.has("cross-entropy-loss-fusion"):
        names = ("cross-entropy-loss-fusion", "cross-entropy-fusion-impl")
        given.set("software.loss", fused_loss(given), *names)
    _attention(given, like_base)
    _data_parallel(given, like_base)
    unfused = "no-gradient-accumulation-fusion"
    if given.flag("use-torch-fsdp2"):
        given.set("software.weight_gradients", "written", "use-torch-fsdp2")
        given.set("software.parameters_copied", True, "use-torch-fsdp2")
    elif given.flag(unfused):
        half = given.flag("grad-reduce-in-bf16")
        given.set("software.weight_gradients", "added" if half else "added-fp32", unfused)
    full, off = "tp-comm-overlap", "no-async-tensor-model-parallel-allreduce"
    if tp > 1 and (given.has(full, off) or not like_base):
        value = "none" if given.flag(off) else "weight-gradient"
        if given.flag(full):  # projections of latent attention have no user buffers: turned off
            latent = given.flag("multi-latent-attention")
            value = "weight-gradient" if latent else "userbuffers"
        given.set("software.overlap_tensor_parallel", value, full, off)
    ring = "cp-comm-type"
    if cp > 1 and (given.has(ring) or not like_base):
        kinds = set(given.words(ring)) or {"p2p"}
        given.set("software.overlap_context_parallel", kinds == {"p2p"}, ring)
        if kinds != {"p2p"}:
            words = " ".join(sorted(kinds))
            text = f"the direction is unknown: {words} is priced as an exposed ring of keys and values"
            given.explain(ring, "not priced", text)
    if given.flag("use-sharp"):
        note = "gathers and scatters move the same bytes; all-reduces add up in the switches"
        given.set("communication.in_network", "all", "use-sharp", note=note)
    _graphs(given)
    if base.software.host is not None and not like_base:
        local = given.text("transformer-impl", "transformer_engine") == "local"
        given.set("software.modules", "torch" if local else "megatron-core", "transformer-impl")


def _attention(given: Given, like_base: bool) -> None:
    names = ("attention-backend", "use-flash-attn", "transformer-impl")
    if not like_base or given.has(*names):
        known = ("local", "transformer_engine", "inference_optimized")
        implementation = given.text(names[2], "transformer_engine", known)
        backend = given.text(names[0], "auto").rpartition(".")[2]
        if backend not in ("flash", "fused", "unfused", "local", "auto"):
            raise InputError(f"{given.place(names[0])}: is not one of flash, fused, unfused, local, auto")
        local = implementation == "local" and not given.flag(names[1])
        kind = "unfused" if backend in ("unfused", "local") or local else "flash"
        given.set("software.attention", kind, *names)
    hidden, attention = "hidden-dropout", "attention-dropout"
    if not like_base or given.has(hidden, attention):
        rate = given.number(hidden, 0.1), given.number(attention, 0.1)
        unfused = given.keys.get("software.attention") == "unfused"
        given.set("software.dropout", rate[0] > 0 or (rate[1] > 0 and unfused), hidden, attention)
        if rate[0] == 0 and rate[1] > 0 and not unfused:
            text = "the real step is slower: dropout inside fused attention is not priced"
            given.explain(attention, "not priced", text)


def _data_parallel(given: Given, like_base: bool) -> None:
    reduce, gather = "overlap-grad-reduce", "overlap-param-gather"
    if given.flag("use-torch-fsdp2"):
        given.set("software.overlap_data_parallel", True, "use-torch-fsdp2", note="FSDP2 always overlaps")
        return
    if like_base and not given.has(reduce, gather):
        return
    sharded = given.keys.get("parallel.zero_stage", 0) > 0
    both = given.flag(reduce) and (given.flag(gather) or not sharded)
    given.set("software.overlap_data_parallel", both, reduce, gather)
    if given.flag(reduce) and not both:
        text = "the real step is faster: without --overlap-param-gather, moesim overlaps gradients neither"
        given.explain(reduce, "not priced", text)


def _graphs(given: Given) -> None:
    names = ("cuda-graph-impl", "enable-cuda-graph", "external-cuda-graph")
    if not given.has(*names):
        return
    modules = tuple(word for name in ("cuda-graph-modules", "cuda-graph-scope") for word in given.words(name))
    implementation = given.text(names[0], "local" if given.flag(names[1]) or given.flag(names[2]) else "none")
    parts = [GRAPH_PARTS.get(module) for module in modules]
    if implementation == "none":
        parts = []
    elif implementation == "full_iteration" or "all" in parts:
        parts = ["all"]
    elif not modules or "layer" in parts:
        parts = ["attention", "router", "experts"]
    chosen = list(dict.fromkeys(part for part in parts if part is not None))
    stated = [name for name in (*names, "cuda-graph-modules", "cuda-graph-scope") if given.has(name)]
    given.set("software.cuda_graphs", chosen, *stated, note="counts only where the base states software.host")


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
    own = recipe.model_dump(exclude_defaults=True)
    value = next((name for name, known in PRECISIONS.items() if known == recipe), own)
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
    small = chosen["main-grads-dtype"] != "fp32" or given.flag("fp16")
    whole = given.flag("accumulate-allreduce-grads-in-fp32")
    half = given.flag("grad-reduce-in-bf16") or (small and not whole)
    return {
        "master_weights": FORMATS[chosen["main-params-dtype"]],
        "gradients": "bf16" if half else "fp32",
        "gradient_reduce": "bf16" if half else "fp32",
        "moments": next(fmt for fmt in ("fp32", "bf16", "fp8") if fmt in moments),
    }


_NAMES = (
    "recompute-granularity", "recompute-modules", "recompute-activations", "moe-layer-recompute",
    "recompute-policy",
)  # fmt: skip


def read_recompute(given: Given, base: Scenario, latent: bool, like_base: bool) -> None:
    """Set what the backward recomputes; `latent` says that the attention has up-projections to recompute.

    Raises InputError for unknown granularities and modules.
    """
    names = [name for name in _NAMES if given.has(name)]
    if not names and like_base:
        given.set("recompute", base.to_dict().get("recompute", "none"), _NAMES[0])
        return
    if given.has("recompute-policy"):
        policy = given.text("recompute-policy", "none", ("none", "op", "full"))
        given.set("recompute", policy, "recompute-policy")
        return
    in_part = like_base and given.has("recompute-modules")  # the granularity is in a part that is not read
    default = "selective" if given.flag("recompute-activations") or in_part else ""
    granularity = given.text("recompute-granularity", default, ("full", "selective", "none"))
    modules = set(given.words("recompute-modules")) or {"core_attn"}
    if given.flag("moe-layer-recompute"):
        modules |= {"moe"}
        granularity = granularity or "selective"
    if granularity == "full":
        _full(given)
        return
    if granularity in ("", "none"):
        given.set("recompute", "none", "recompute-granularity", *names)
        return
    unknown = sorted(modules - set(MODULES))
    if unknown:
        raise InputError(
            f"{given.place('recompute-modules')}: {unknown[0][:40]!r} is not modelled; modules are "
            f"{', '.join(MODULES)}"
        )
    if "mla_up_proj" in modules and not latent:
        raise InputError(
            f"{given.place('recompute-modules')}: mla_up_proj needs --multi-latent-attention; leave it out"
        )
    given.set("recompute", [module for module in MODULES if module in modules], *names)


def _full(given: Given) -> None:
    method = given.text("recompute-method", "uniform", ("uniform", "block"))
    layers = given.integer("recompute-num-layers", 1, least=0 if method == "block" else 1)
    if layers == 0:
        names = ("recompute-granularity", "recompute-method", "recompute-num-layers")
        given.set("recompute", "none", *names, note="0 layers of every stage are recomputed")
        return
    given.set("recompute", "full", "recompute-granularity")
    if method == "block":
        text = (
            f"the real step is faster and it needs more memory: only {layers} layers of every stage are "
            "recomputed, and moesim recomputes all"
        )
        given.explain("recompute-method", "not priced", text)
    elif given.has("recompute-method"):
        given.explain("recompute-method", "key", "recompute = full (every layer)")
    if given.has("recompute-num-layers") and method == "uniform" and layers > 1:
        text = f"the direction is unknown: inputs of every {layers}th layer are kept, and moesim keeps those "
        given.explain("recompute-num-layers", "not priced", text + "of every layer")
    elif given.has("recompute-num-layers"):
        given.explain("recompute-num-layers", "key", "recompute = full")
