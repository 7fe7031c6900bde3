"""Meaning of the arguments on activation recomputation."""

from __future__ import annotations

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.recompute import MODULES
from moesim.simulator.scenario import Scenario
from moesim.simulator.trainers.meaning.given import Given

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
    if given.has("recompute-num-layers"):
        if method == "uniform" and layers > 1:
            text = (
                f"the direction is unknown: inputs of every {layers}th layer are kept, and moesim keeps "
                "those of every layer"
            )
            given.explain("recompute-num-layers", "not priced", text)
        else:
            given.explain("recompute-num-layers", "key", "recompute = full")
