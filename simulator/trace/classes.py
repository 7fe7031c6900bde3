"""Which class of our model a GPU event belongs to: by the kernel's name and by what launched it.

`classify` is a function of texts alone. Order of the rules: the user's own; communication; what the launching
operators and annotations say; the kernel's name; then generic arithmetic, for which `context` looks at
neighbours on the stream. A kernel that is known and that the model does not price is NOT_IN_MODEL; one
that no rule knows is UNCLASSIFIED.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, field_validator

from moesim.hwmodels.files import read_text
from moesim.hwmodels.validation import validate_model
from moesim.hwmodels.yaml_io import parse_mapping

NOT_IN_MODEL, UNCLASSIFIED = "not_in_model", "unclassified"
COMPUTE = (
    "gemm", "wgrad_gemm", "gate_gemm", "grouped_gemm",
    "attention_forward", "attention_backward", "attention_pre_post",
    "norm", "swiglu", "rope", "permute", "topk", "cast", "copy", "transpose", "elementwise", "embedding",
    "loss",
    "scan", "indexer", "optimizer", "clip", "fsdp_copy", "fill", NOT_IN_MODEL, UNCLASSIFIED,
)  # fmt: skip
COMMUNICATION = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv", "ep_dispatch",
    "ep_combine", "ep_notify", "other_communication",
)  # fmt: skip
COPIES = ("memcpy_h2d", "memcpy_d2h", "memcpy_d2d", "memcpy_p2p", "memset")
MOST_NAME = 4000
"""Characters of a kernel's name that rules see."""
CLASSES = COMPUTE + COMMUNICATION + COPIES
"""All classes; an event's `cls` is a place here."""

_COLLECTIVES = (
    (r"userbuffers\w*_ag(?![a-z])", "all_gather"),
    (r"userbuffers\w*_rs(?![a-z])", "reduce_scatter"),
    (r"all_?reduce|cross_device_reduce|twoshot|oneshot|userbuffers\w*_sum_inplace", "all_reduce"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather", "all_gather"),
    (r"all_?to_?all|alltoall", "all_to_all"),
    (r"broadcast|bcast", "broadcast"),
    (r"send_?recv|send|recv|coalesced", "send_recv"),
)
_NCCL = re.compile(r"nccl\w*Kernel|nccl(?:AllR|AllG|ReduceS|SendR|Broad|Gener)|rccl|mscclKernel", re.I)
_EXPERT = re.compile(
    r"deep_ep|dpsk::ep|hybrid_?ep|uccl|internode|intranode|(?:ep|moe)_(?:dispatch|combine)_kernel|"
    r"\bEp(?:Dispatch|Combine)|(?:a2a|moe_?a2a)_?(?:dispatch|combine)", re.I
)  # fmt: skip
_OTHER_COMM = re.compile(
    r"all_?reduce|multimem_all_gather|cross_device_reduce|two_shot|nvshmem|rocshmem|nvls_|userbuffers", re.I
)


def _both(one: str, other: str) -> str:
    """A pattern of names that hold both, in any order; anchored, so that it takes linear time."""
    return rf"^(?=.*(?:{one}))(?=.*(?:{other}))"


_BACKWARDS = "bwd|bprop|backward"
_MIXERS = (
    r"causal_conv1d|selective_scan|chunk_(?:scan|state|fwd|bwd|gated|local_cumsum|cumsum_|scaled_dot)|bmm_chunk|"
    r"state_passing|gated_delta|recompute_w_u|solve_tril|64x64_inverse|wy_repr|fused_recurrent"
)
_NAMED: tuple[tuple[str, str], ...] = (
    (rf"{_MIXERS}|ssd_|mamba", "scan"),
    (r"mqa_logits|lightning_indexer", "indexer"),
    (_both("masked_softmax", "bwd|backward"), "attention_backward"),
    (r"masked_softmax", "attention_forward"),
    (r"split_embedding|bounds_check_indices|permute_pooled|fbgemm|jagged|batch_?norm|max_?pool|avg_?pool|igemm|"
     r"conv(?:olve|olution|\dd|_depthwise|[._]?[fd]prop)|conv_|cudnn_(?:train|infer)|cudnn::bn|cudnn::detail::|"
     r"(?:s\d{4,6}|xmma_)(?:fprop|dgrad|wgrad)|implicit_(?:gemm|conv)|wgrad_alg|dgrad_engine|nchwToNhwc|"
     r"nhwcToNchw|SubTensorOp|im2d?2?col|col2im|batched_transpose_\d|transpose_(?:CNHW|NCHW)|dropout|miopen|"
     r"and_cache|kv_?(?:buffer|cache_(?:store|write)|indices)|store_kv|page_indices|winograd|naive_conv|"
     r"upsample|interpolat|sampling|lstm|binary_cross", NOT_IN_MODEL),
    (r"(?:un)?permute(?!d)|moe_recover|finalize(?:Moe|Kernel)|finalize_matmul_scatter", "permute"),
    (r"silu_(?:and_)?mul", "swiglu"),
    (r"deep_gemm::(?:transpose|pack)", "transpose"),
    ("|".join((_both("moe", "gemm"), _both("bmm_", "swiGlu|dynBatch|Bfloat16_Mx|MxE"),
     _both("deep_gemm", r"GemmType\)?[12]"),
     r"GroupProblemShape|grouped_?gemm|group_gemm|GemmGrouped|matmul_ogs|fused_moe_kernel|prepare_grouped|"
     r"grouped_mm|finalize_matmul|marlin_moe|fmoe_|kernel_mg_(?:forward|backward)")), "grouped_gemm"),
    (r"compute_dot_do_o|convert_dq|fmha_reduce_head|dot_do_o|bwd_?(?:pre|post)process|bwd_convert|OGradDotO|"
     r"attn_bwd_(?:pre|post)|ConvertQGrad", "attention_pre_post"),
    (_both("flash|fmha|attn|attention|mla|sdpa", _BACKWARDS), "attention_backward"),
    (r"flash|fmha|attention|attn|sdpa|_mla|(?<![a-z])mla_|mha_fwd|reduce_segments|Batch(?:Prefill|Decode)|"
     r"MergeStates?Kernel|_fwd_(?:grouped_)?kernel_stage|cu_?seqlens", "attention_forward"),
    (r"nvjet|gemm|gemv|Cijk_|cublasLt|splitK_?reduce|cutlass_\d|s16816|dot_kernel|scaled_mm|_matmul|wvSplitK|"
     r"matmul_kernel|wgmma|marlin|^triton_tem_fused.*mm", "gemm"),
    (r"rotary|rope(?!r)", "rope"),
    (r"rms_?norm|layer_?norm|GammaBeta|ln_fwd|ln_bwd|group_?norm|l2norm_(?:fwd|bwd)|RowwiseMoments|"
     r"cuCompute(?:GradInput|PartGrad)", "norm"),
    (r"silu|swiglu|gelu|act_and_mul|geglu|swish|relu|do(?:Gated)?Activation|::activation", "swiglu"),
    (r"nll_loss|cross_entropy|LogSoftMax|log_softmax|(?<!aux_)loss|online_softmax|mse_", "loss"),
    (r"gatherTopK|topk|routing|gating|fused_gate|aux_loss|bitonicSort|radixSelect|biggest|sum_bitmatrix",
     "topk"),
    (r"softmax", "?softmax"),
    (r"adam|sgd_|SGDFunctor|LambStage|lamb_kernel|adagrad|FusedOptimizer|muon_|newton_schulz", "optimizer"),
    (r"LpNorm|clip_grad|l2norm|NormTwoOps|^cleanup\(", "clip"),
    (r"\bScaleFunctor", "?scale"),
    (r"embedding|compute_grad_weight|sum_and_scatter|krn_partial|partial_segment", "embedding"),
    (r"chunk_cat|split_with_sizes_copy", "fsdp_copy"),
    (r"moe_|MoeSort|permut|index_put|index_elementwise|indexing_backward|gather|scatter|Radix_?Sort|histogram|"
     r"align_block|fill_indices|fill_reverse|index_?select|index_copy|index_add|DeviceScan|DeviceSelect|"
     r"DeviceReduce|scan_|UniqueByKey|finalize|masked_select|nonzero|cumsum|expand(?:Input)?Rows|row_id_map|multihot|"
     r"sort_chunks|chunk_sort|reorder_triton|src2dst|expert_?(?:tokens|prefix|maps)|multi_(?:un)?padding",
     "permute"),
    (r"quant|to_fp8|(?<!broad)cast|per_token|float8|hfp8|FP8row|swizzle_(?:row|col)|amax|delayed_scaling|"
     r"ScaleAndScaleInv", "cast"),
    (r"transpose", "transpose"),
    (r"FillFunctor|_memset|fill_kernel", "fill"),
    (r"float16_copy_kernel|float8_copy", "cast"),
    (r"CatArray|direct_copy|copy_kernel|copy_device", "copy"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern, re.I), name) for pattern, name in _NAMED)
_ARITHMETIC = re.compile(
    r"elementwise|reduce_kernel|triton_(?:poi|red|per)|multi_tensor_apply|conj_kernel|Functor|softmax|multi_output|"
    r"_kernel_with_index|distribution|random|philox|TensorOp|vectorized",
    re.I,
)
_WHOLE_NUMBERS = re.compile(
    r"<long, "
    r"long|lambda\(long\)|Functor\w*<(?:long|int)>|<long>|arange|remainder|floor_divide|histc|<int, int"
)
_OPTIMIZER = re.compile(
    r"Optimizer\.step|_fused_adam|_foreach_(?:lerp|addcdiv|addcmul|sqrt)|## optimizer|optimizer_step", re.I
)
_ATTENTION_OP = re.compile(
    r"scaled_dot_product|flash_attention|flash_attn|unified_attention|efficient_attention|cudnn_attention|FlashAttn|"
    r"FusedAttn|flex_attention",
    re.I,
)
_FSDP = re.compile(r"^FSDP::(?!cast_forward)|^fsdp::|FullyShardedDataParallel\.")
_BACKWARD = re.compile(r"backward|bprop|bwd", re.I)
_SAID_BY_OPERATORS = (
    (r"cross_?entropy|nll_loss|log_?softmax", "loss"),
    (r"aten::_?foreach_norm|clip_grad|linalg_vector_norm|aten::_foreach_mul_", "clip"),
    (r"aten::embedding|EmbeddingBackward", "embedding"),
    (r"_norm(?:_backward)?(?= |$)|rms_?norm|layer_?norm(?!Linear|MLP)", "norm"),
    (r"swiglu|geglu|bias_?gelu", "swiglu"),
    (r"rotary|rope(?!r)", "rope"),
)
"""What operators around a launch say of arithmetic and copies; a kernel whose name says more is not asked."""
_TRITON = (
    (r"log_softmax|nll_loss|cross_entropy", "loss"), (r"rms|layer_norm|rsqrt|native_layer", "norm"),
    (r"silu|gelu|swiglu", "swiglu"), (r"embedding", "embedding"), (r"topk", "topk"),
    (_both("cat|stack", "neg") + "|complex|rotary", "rope"), (r"index|scatter|gather|sort", "permute"),
    (r"flex_attention_backward", "attention_pre_post"),
    (r"amax|float8|scaled_mm|" + _both("abs", "max"), "cast"),
    (r"softmax", "?softmax"), (r"sigmoid", "?sigmoid"), (r"constant_pad|(?:^|_)cat(?:_|$)", "copy"),
    (r"^(?:to_copy|view|clone|_)+$", "cast"),
)  # fmt: skip


class Rule(BaseModel):
    """One rule of the user: a kernel whose name matches is of the class; `launched_by` narrows it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    cls: str
    launched_by: str = ""

    @field_validator("name", "launched_by")
    @classmethod
    def _pattern(cls, value: str) -> str:
        if len(value) > 500:
            raise ValueError("longer than 500 characters")
        if re.search(r"[+*}]\)?[+*{]|\([^)]*[+*|][^)]*\)[+*{]", value):
            raise ValueError(
                "a repetition of a repetition or of a choice could take for ever; write it without"
            )
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return value

    @field_validator("cls")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in CLASSES:
            raise ValueError(f"{value!r} is no class; classes are {', '.join(CLASSES)}")
        return value


class Rules(BaseModel):
    """A file of rules: `rules`, tried in order before ours."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rules: tuple[Rule, ...]


def read_rules(path: Path) -> Rules:
    """The user's rules of a YAML file; raises InputError with key, value and the known classes."""
    text = read_text(path, 1_000_000, "file of rules")
    return validate_model(Rules, parse_mapping(text, path.name), path.name)


def own_class(name: str) -> str | None:
    """The class of a kernel that `trace export` wrote, such as `gemm moesim::wgrad_gemm::mla.q_up`."""
    found = re.search(r"\bmoesim::(\w+)::", name)
    return found[1] if found and found[1] in CLASSES else None


def collective(name: str) -> str:
    """The class of a collective by its kernel or operator name, or other_communication."""
    low = name.lower()
    for pattern, found in _COLLECTIVES:
        if re.search(pattern, low):
            return found
    return "other_communication"


def communication(name: str, path: tuple[str, ...], kind: str) -> str | None:
    """The class of a communication kernel, or None; `kind` is what the file calls the collective.

    NCCL runs an all-to-all as sends, so that the operator's word wins over the kernel's.
    """
    if name.startswith("triton_"):
        return None  # the fused operators stand in the name, and a collective is none of them
    if _EXPERT.search(name):
        low = re.split(r"[<(]", name.lower().replace("(anonymous namespace)::", ""))[0]
        if "cast" in low or "permut" in low:
            return None
        if "notify" in low or "layout" in low or "barrier" in low:
            return "ep_notify"
        return "ep_dispatch" if "dispatch" in low else "ep_combine" if "combine" in low else "ep_notify"
    if not (_NCCL.search(name) or _OTHER_COMM.search(name)):
        return None
    named = collective(name)
    if named not in ("send_recv", "other_communication"):
        return named
    said = collective(kind) if kind else "other_communication"
    if said in ("other_communication", "send_recv") or "coalesced" in kind:
        for outer in reversed(path):
            if re.match(r"nccl:|c10d::|_c10d_functional::", outer) and "coalesced" not in outer:
                found = collective(outer)
                if found != "other_communication":
                    return found
    return said if said != "other_communication" else named


def classify(
    name: str, path: tuple[str, ...], activity: int, kind: str = "", rules: Rules | None = None
) -> str:
    """The class of an activity: its name, the operators and annotations around its launch, outermost first.

    A result that begins with "?" is generic arithmetic, which `context` decides by its neighbours.
    """
    for rule in rules.rules if rules else ():
        if re.search(rule.name, name[:MOST_NAME]) and (
            not rule.launched_by or any(re.search(rule.launched_by, outer[:500]) for outer in path)
        ):
            return rule.cls
    name = name[:MOST_NAME].replace("flashinfer", "")  # a library of everything, not of attention only
    found = communication(name, path, kind)
    if found:
        return found
    summed = path[-1:] in (("aten::add",), ("aten::add_",)) and len(path) > 1
    if summed and re.search(r"^autograd::engine|AccumulateGrad", path[-2]):
        return "elementwise"  # autograd sums the gradients of what was used twice
    inner = next((part for part in reversed(path) if part.startswith("aten::")), path[-1] if path else "")
    joined = " ".join(path)
    if _OPTIMIZER.search(joined):
        return "optimizer"
    if any(_FSDP.search(part) for part in path):
        return "fsdp_copy"
    if name.startswith("__amd_rocclr_"):
        activity = 2 if "fill" in name else 1
    if activity:
        return _copied(name, activity, path)
    if re.search(r"convolution|batch_norm|max_pool|fbgemm|split_embedding|SplitLookup", joined, re.I):
        return NOT_IN_MODEL
    named = _by_name(name)
    if _ATTENTION_OP.search(joined):
        if named in ("attention_pre_post", "rope", "cast", NOT_IN_MODEL) or (named or "").startswith(
            "attention"
        ):
            return str(named)
        return "attention_backward" if _BACKWARD.search(joined) else "attention_forward"
    if named == "gemm" and re.search(r"grouped_?(?:linear|mlp|gemm|mm)", joined, re.I):
        return "grouped_gemm"
    if named in (None, "?softmax", "fill", "copy", "cast", "permute", "transpose", "norm"):
        below = " ".join(part for part in path if not part.startswith("autograd::engine"))
        for words, said in _SAID_BY_OPERATORS:
            if re.search(words, below, re.I) and not (said == "norm" and "foreach" in joined):
                return said
    if named in (None, "fill", "copy", "cast") and not name.startswith("triton_"):
        return _generic(name, inner, joined)
    return named or _generic(name, inner, joined)


def _copied(name: str, activity: int, path: tuple[str, ...]) -> str:
    if activity == 2:
        return "memset"
    low = name.lower().replace(" -> ", "to").replace("device", "d").replace("host", "h")
    for words, found in (
        ("htod", "memcpy_h2d"),
        ("dtoh", "memcpy_d2h"),
        ("ptop", "memcpy_p2p"),
        ("peer", "memcpy_p2p"),
    ):
        if words in low or (words == "htod" and "pageabletod" in low):
            return found
    return "memcpy_d2d"


def _by_name(name: str) -> str | None:
    if name.startswith("triton_") and not name.startswith("triton_tem"):
        core = re.sub(r"^triton_[a-z]+_fused_?|_?\d+$", "", name)
        return next((found for pattern, found in _TRITON if re.search(pattern, core)), None)
    return next((found for pattern, found in _COMPILED if pattern.search(name)), None)


def _generic(name: str, inner: str, joined: str) -> str:
    """Copies, fills and arithmetic, by the operator around them."""
    if "complex" in name or "conj" in name:
        return "rope"
    copies = "copy_kernel" in name or "direct_copy" in name or "CatArray" in name
    if copies and re.search(r"all_?(?:to|2)_?all", joined, re.I):
        return "copy"  # the parts that ranks exchanged, put together
    if re.search(r"aten::(?:index|index_put|_index_put_impl|sort|argsort|gather|scatter|histc|cumsum|topk|"
                 r"bincount|nonzero|masked_select|repeat_interleave|unique)", joined):  # fmt: skip
        return "topk" if "aten::topk" in joined else "permute"
    if (
        re.search(r"aten::(?:zeros|new_zeros|zero_|fill_|full|ones|zeros_like|ones_like)$", inner)
        or "FillFunctor" in name
    ):
        return "?sliced" if "slice_backward" in joined else "?fill"
    if re.search(r"LoadWithCast|bfloat16_copy|float16_copy|float8_copy", name) and "copy" in name:
        return "?cast"
    if "CompiledFunction" in joined and "copy" in name:
        return "copy"
    if "CatArray" in name or (copies and re.search(r"aten::(?:cat|stack|slice_backward)\b", joined)):
        return "?cat"
    if copies:
        return "?cast" if re.search(r"aten::(?:_to_copy|to|type|float|half|bfloat16)\b", joined) else "?copy"
    if _WHOLE_NUMBERS.search(name):
        return "?integer"
    if "aten::topk" in joined:
        return "topk"
    if re.search(r"aten::_?softmax", joined):
        return "?softmax"
    if "aten::sigmoid" in joined:
        return "?sigmoid"
    if inner == "aten::neg" or "neg_kernel" in name:
        return "?neg"
    if re.search(r"rsqrt|pow_tensor_scalar", name):
        return "?norm"
    if "MeanOps" in name:
        return "?mean"
    if "MulFunctor" in name or "aten::mul" in inner:
        return "?mul"
    if _ARITHMETIC.search(name):
        return "?elementwise"
    return _by_name(name) or UNCLASSIFIED


_ROUTING = (
    "topk", "?cast", "?copy", "?elementwise", "?mul", "?sigmoid", "?softmax", "cast", "?fill", "fill", "copy",
)  # fmt: skip
_GEMMS = ("gemm", "grouped_gemm", "gate_gemm")


def _routes(kinds: list[str], ops: list[str], n: int) -> bool:
    """Whether only scores, casts and sums stand between a GEMM and the choice of experts."""
    for m in range(n + 1, min(n + 8, len(kinds))):
        if kinds[m] == "topk" and ("topk" in ops[m] or not ops[m]):
            return True
        if kinds[m] not in _ROUTING:
            return False
    return False


def _activates(kinds: list[str], n: int) -> bool:
    """Whether arithmetic stands between two grouped GEMMs with nothing but arithmetic and copies near it."""
    ends = ("grouped_gemm", "gemm", "attention_forward", "attention_backward", *COMMUNICATION)
    before = next((kind for kind in reversed(kinds[max(0, n - 24) : n]) if kind in ends), "")
    after = next((kind for kind in kinds[n + 1 : n + 25] if kind in ends), "")
    return before == after == "grouped_gemm"


def _multiplies_activation(kinds: list[str], ops: list[str], n: int) -> bool:
    """Whether a product follows an activation at once, or behind the other GEMM of a gated feed-forward."""
    before = kinds[max(0, n - 4) : n][::-1]
    if "swiglu" not in before:
        return False
    place = before.index("swiglu")
    following = next((kind for kind in kinds[n + 1 : n + 4] if kind not in ("memset", "?cast")), "")
    gated = following in _GEMMS or "silu" in ops[n - 1 - place]
    return gated or not any(kind in _GEMMS for kind in before[:place])


def _beside_choice(kinds: list[str], n: int) -> bool:
    """Whether the choice of experts stands shortly before or just behind, and no GEMM between."""
    before = kinds[max(0, n - 8) : n][::-1]
    if "topk" in before and "gemm" not in before[: before.index("topk")]:
        return True
    after = kinds[n + 1 : n + 4]
    return "topk" in after and "gemm" not in after[: after.index("topk")]


def _rotary(kinds: list[str]) -> set[int]:
    """Places of rotary embeddings: a negation beside a concatenation, and arithmetic that runs on from it."""
    joins = ("?cat", "?sliced")
    found = set()
    for n, kind in enumerate(kinds):
        if kind != "?neg" or not any(near in joins for near in kinds[max(0, n - 4) : n + 5]):
            continue
        for way in (range(n, min(n + 7, len(kinds))), range(n - 1, max(n - 7, -1), -1)):
            for m in way:
                if kinds[m] in (*joins, "?elementwise", "?mul", "?neg"):
                    found.add(m)
                elif kinds[m] not in ("?cast", "?copy", "?fill"):
                    break
    return found


def context(kinds: list[str], ops: list[str]) -> list[str]:
    """Decide generic events of one stream, in order of launch, by the classes of their neighbours.

    A negation beside a concatenation is a rotary embedding, and what multiplies, adds and joins beside it
    too; a product after an activation, and arithmetic between two grouped GEMMs, belong to the activation;
    a product and sum around a root and a mean belong to a norm; whole numbers beside permutes, and
    arithmetic beside the choice of experts, belong to the routing; a softmax between two GEMMs is
    attention's; the GEMM that the scores of experts come from is the router's.
    """
    decided = list(kinds)
    turned = _rotary(kinds)
    for n, kind in enumerate(kinds):
        if kind == "gemm" and _routes(kinds, ops, n):
            decided[n] = "gate_gemm"
        elif kind == "permute" and ops[n] == "aten::gather" and "topk" in kinds[max(0, n - 5) : n]:
            decided[n] = "topk"
        elif kind.startswith("?"):
            decided[n] = _decided(kinds, ops, turned, n)
    return decided


def _decided(kinds: list[str], ops: list[str], turned: set[int], n: int) -> str:
    kind = kinds[n]
    before, after = kinds[max(0, n - 4) : n], kinds[n + 1 : n + 5]
    near = before[-3:] + after[:3]
    plain = kind in ("?elementwise", "?mul", "?neg")
    if n in turned:
        return "rope"
    if kind == "?integer":
        wide = kinds[max(0, n - 8) : n + 9]
        routes = any(other in ("permute", "topk", "grouped_gemm") for other in wide)
        return "permute" if routes else "elementwise"
    if kind in ("?norm", "?mean"):
        pair = "?norm" in near or (kind == "?norm" and "?mean" in near)
        return "clip" if "clip" in near else "norm" if pair else "elementwise"
    if kind == "?scale":
        return next(
            (k for k in reversed(kinds[max(0, n - 64) : n]) if k in ("optimizer", "clip")), "elementwise"
        )
    if kind in ("?fill", "?sliced"):
        return "permute" if "permute" in after[:2] + before[-1:] else "fill"
    if kind == "?mul" and _multiplies_activation(kinds, ops, n):
        return "swiglu"
    if plain and "?norm" in near and _is_norm(kinds, n):
        return "norm"
    if (plain or kind == "?sigmoid") and _activates(kinds, n):
        return (
            "elementwise" if before[-1:] in (["?copy"], ["?cat"]) else "swiglu"
        )  # a bias of experts, copied out
    if (plain or kind in ("?sigmoid", "?softmax")) and _beside_choice(kinds, n):
        return "topk"
    if kind == "?softmax":
        held = any(k in _GEMMS for k in before) and any(k in _GEMMS for k in after)
        side = "backward" if "backward" in ops[n] else "forward"
        return f"attention_{side}" if held else "elementwise"
    if kind in ("?copy", "?cat"):
        return "permute" if "permute" in after[:2] else "copy"
    return "elementwise" if plain or kind == "?sigmoid" else kind[1:]


def _is_norm(kinds: list[str], n: int) -> bool:
    """Whether a root and a mean stand near."""
    wide = kinds[max(0, n - 6) : n + 7]
    return wide.count("?norm") > 1 or "?mean" in wide
