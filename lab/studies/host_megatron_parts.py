"""Parts of host_megatron.py: stages of a routed layer apart, modules of a layer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.moe import moe_utils

from lab.studies import host_megatron_models as models
from lab.studies.host_blocks_study import Study, spread
from lab.studies.host_megatron_models import BF, HIDDEN, TOKENS, MegatronCase

Call = Callable[..., Any]


def repeats(study: Study) -> int:
    """How often a call is timed."""
    return 3 if study.dry else 25


def leaf(study: Study, *shape: int) -> torch.Tensor:
    """A tensor of random numbers that wants a gradient."""
    return torch.randn(*shape, dtype=BF, device=study.device, requires_grad=True)


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors in a result that have a backward."""
    items = result if isinstance(result, (tuple, list)) else (result,)
    return [x for x in items if isinstance(x, torch.Tensor) and x.requires_grad]


def again(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values, with a fresh leaf in the place of every tensor that has a backward."""
    return tuple(
        v.detach().requires_grad_() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in values
    )


def once(
    study: Study, call: Call, values: Sequence[Any], weights: list[torch.Tensor]
) -> tuple[Any, float, float]:
    """A call's result and the host seconds of its forward and its backward, each from an idle device.

    The backward hands the gradients back, so nothing is accumulated and no hook runs.
    """
    study.synchronise()
    t0 = time.perf_counter()
    result = call(*values)
    t1 = time.perf_counter()
    outputs = flat(result)
    if not outputs:
        return result, t1 - t0, 0.0
    seeds = [torch.ones_like(y) for y in outputs]
    wanted = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad] + weights
    study.synchronise()
    t2 = time.perf_counter()
    torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, retain_graph=False)
    t3 = time.perf_counter()
    return result, t1 - t0, t3 - t2


def timed(study: Study, call: Call, *values: Any, module: torch.nn.Module | None = None) -> dict[str, Any]:
    """Medians of a call's forward and backward."""
    weights = list(module.parameters()) if module is not None else []
    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    try:
        for i in range(repeats(study) + 3):
            _, forward, backward = once(study, call, again(values), weights)
            if i >= 3:
                times.append((forward, backward))
    finally:
        gc.enable()
    return {"forward": spread([f for f, _ in times]), "backward": spread([b for _, b in times])}


def guarded(call: Callable[[], Any]) -> Any:
    """What a call returns, or its failure."""
    try:
        return call()
    except Exception as error:
        return {"failed": repr(error)[-600:]}


def stages(study: Study, case: MegatronCase) -> dict[str, Any]:
    """Stages of a routed layer apart, each with its own backward, and the wait for the token counts."""
    mlp: Any = models.build(MegatronCase(**{**vars(case), "layers": 1}), study.device).decoder.layers[0].mlp
    dispatcher, router = mlp.token_dispatcher, mlp.router
    times: dict[str, list[tuple[float, float]]] = {}
    reads: list[float] = []
    read = dispatcher._maybe_dtoh_and_synchronize

    def timed_read(*args: Any) -> Any:
        start = time.perf_counter()
        out = read(*args)
        reads.append(time.perf_counter() - start)
        return out

    dispatcher._maybe_dtoh_and_synchronize = timed_read

    def stage(name: str, call: Call, values: Sequence[Any], module: torch.nn.Module | None = None) -> Any:
        weights = list(module.parameters()) if module is not None else []
        result, forward, backward = once(study, call, again(values), weights)
        times.setdefault(name, []).append((forward, backward))
        return result

    x = leaf(study, TOKENS, 1, HIDDEN)
    gc.disable()
    try:
        for _ in range(repeats(study) + 3):
            probs, chosen = stage("router", router, (x,), router)
            rows, p = stage("preprocess", dispatcher.dispatch_preprocess, (x, chosen, probs))
            rows, p = stage("dispatch", dispatcher.token_dispatch, (rows, p))
            rows, counts, p = stage("postprocess", dispatcher.dispatch_postprocess, (rows, p))
            y, _ = stage("experts", mlp.experts, (rows, counts, p), mlp.experts)
            y = stage("combine preprocess", dispatcher.combine_preprocess, (y,))
            y = stage("combine", dispatcher.token_combine, (y,))
            stage("combine postprocess", dispatcher.combine_postprocess, (y,))
    finally:
        gc.enable()
    out: dict[str, Any] = {
        name: {"forward": spread([f for f, _ in t[3:]]), "backward": spread([b for _, b in t[3:]])}
        for name, t in times.items()
    }
    out["reads, all points of a layer"] = spread(
        [sum(reads[i : i + 4]) for i in range(12, len(reads) - 3, 4)]
    )
    out["layer"] = guarded(lambda: timed(study, lambda v: mlp(v)[0], x, module=mlp))
    out |= inner(study, mlp, x, case)
    return out


def inner(study: Study, mlp: Any, x: torch.Tensor, case: MegatronCase) -> dict[str, Any]:
    """Calls inside the stages that a module of Transformer Engine would replace."""
    router, dispatcher = mlp.router, mlp.token_dispatcher
    probs, chosen = router(x)
    flat_x = x.detach().view(-1, HIDDEN).requires_grad_()
    rows, p, order = moe_utils.permute(flat_x, chosen, probs=probs, num_out_tokens=TOKENS * 4)
    logits = router.gating(x).detach().view(-1, case.experts).requires_grad_()
    sizes = chosen.sum(dim=0).cpu()
    top = partial(moe_utils.topk_routing_with_score_function, topk=4, score_function=router.score_function)
    calls: dict[str, Callable[[], Any]] = {
        "gating": lambda: timed(study, router.gating, x, module=router),
        "top-k": lambda: timed(study, top, logits),
        "routing": lambda: timed(study, router.routing, logits.view(TOKENS, 1, -1)),
        "permute": lambda: timed(
            study,
            lambda a, b: moe_utils.permute(a, chosen, probs=b, num_out_tokens=TOKENS * 4)[:2],
            flat_x,
            probs,
        ),
        "unpermute": lambda: timed(
            study,
            lambda a: moe_utils.unpermute(a, order, restore_shape=flat_x.shape, routing_map=chosen),
            rows,
        ),
        "sort": lambda: timed(
            study,
            lambda a, b: moe_utils.sort_chunks_by_idxs(a, sizes, torch.arange(case.experts), probs=b),
            rows,
            p,
        ),
        "counts": lambda: timed(study, dispatcher.preprocess, chosen),
    }
    return {f"inside: {name}": guarded(call) for name, call in calls.items()}


def modules(study: Study) -> dict[str, Any]:
    """Modules of a layer apart, and plain calls of PyTorch measured the same way."""
    model: Any = models.build(MegatronCase(1), study.device)
    one, x = model.decoder.layers[0], leaf(study, TOKENS, 1, HIDDEN)
    linear = one.self_attention.linear_proj
    compiled, eager = get_bias_dropout_add(True, True), get_bias_dropout_add(True, False)
    calls: dict[str, Callable[[], Any]] = {
        "self-attention": lambda: timed(
            study, lambda v: one.self_attention(v, attention_mask=None)[0], x, module=one.self_attention
        ),
        "layer": lambda: timed(study, lambda v: one(hidden_states=v)[0], x, module=one),
        "mlp": lambda: timed(study, lambda v: one.mlp(v)[0], x, module=one.mlp),
        "norm": lambda: timed(study, one.input_layernorm, x, module=one.input_layernorm),
        "linear": lambda: timed(study, lambda v: linear(v)[0], x, module=linear),
        "bias-dropout-add, compiled": lambda: timed(study, lambda a, b: compiled((a, None), b, 0.0), x, x),
        "bias-dropout-add, eager": lambda: timed(study, lambda a, b: eager((a, None), b, 0.0), x, x),
        "addition": lambda: timed(study, torch.add, x, x),
    }
    return {name: guarded(call) for name, call in calls.items()}
