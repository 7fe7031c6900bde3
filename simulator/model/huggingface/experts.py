"""Reads the keys of routed and shared experts."""

from __future__ import annotations

from typing import Any

from moesim.simulator.model.huggingface.reader import Reader

_COUNT = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
)
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SCORING = {name: name for name in ("softmax", "sigmoid", "sqrtsoftplus")}
_TOPK_METHODS: dict[str, tuple[str | None, bool]] = {
    "noaux_tc": ("top2-sum", True),
    "group_limited_greedy": ("best", False),
    "greedy": (None, False),
}
"""(ranking of the groups, whether a balance bias enters the choice) for every topk_method."""


def routed(r: Reader, scoring: str, *, width: tuple[str, ...] = _WIDTH, **more: Any) -> dict[str, Any]:
    """Fields of routed experts; `more` are further fields, left out where False."""
    return {
        "experts": r.integer(*_COUNT, meaning="routed experts"),
        "top_k": r.integer(*_TOP_K, meaning="experts a token"),
        "expert_ffn": r.integer(*width, meaning="width of one expert"),
        "scoring": scoring,
        **{key: value for key, value in more.items() if value is not False},
    }


def scoring_of(r: Reader, *keys: str, absent: str | None = None) -> str:
    """How scores come from logits; `absent` where the modelling code of a family fixes it."""
    keys = keys or ("scoring_func",)
    return r.choice(
        *keys, legal=_SCORING, meaning="scores from logits", **({} if absent is None else {"absent": absent})
    )


def shared(r: Reader, width: int, *keys: str, absent: Any = 0) -> dict[str, Any]:
    """Fields of shared experts of `width`; no key or null means none."""
    keys = keys or ("n_shared_experts", "num_shared_experts")
    count = r.integer(*keys, meaning="shared experts", least=0, absent=absent, null=0)
    return {"shared_experts": count, "shared_ffn": width} if count else {}


def groups(r: Reader, score: str | None, *keys: str) -> dict[str, Any]:
    """Fields of a gate that reaches some groups of experts only; keys default to DeepSeek's."""
    count_key, reach_key = keys or ("n_group", "topk_group")
    count = r.integer(count_key, meaning="groups of experts", absent=1, null=1)
    per_token = r.integer(reach_key, meaning="groups that a token may reach", absent=1, null=1)
    if per_token > count:
        raise r.error(
            f"{r.prefix}{reach_key}={per_token} is above {count_key}={count}: a token cannot reach more "
            "groups than there are; correct one of them"
        )
    if per_token == count or score is None:
        return {}
    return {"groups": count, "groups_per_token": per_token, "group_score": score}


def deepseek_experts(
    r: Reader, *, method: str | None = None, scoring: str | None = None, required: bool = False
) -> dict[str, Any]:
    """Fields of DeepSeek's experts.

    `method` and `scoring` are what the modelling code fixes in families whose files leave them out. With
    `required` the keys of groups and shared experts must be there.
    """
    if required:
        for key in ("n_group", "topk_group", "n_shared_experts"):
            r.take((key,), "experts of DeepSeek's models")
            r.understood.pop()
    score, bias = r.choice(
        "topk_method", legal=_TOPK_METHODS, meaning="how groups are ranked",
        **({} if method is None else {"absent": method}),
    )  # fmt: skip
    fields = routed(r, scoring_of(r, absent=scoring), score_bias=bias)
    return fields | shared(r, fields["expert_ffn"]) | groups(r, score)
