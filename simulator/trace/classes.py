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
CLASSES = COMPUTE + COMMUNICATION + COPIES
"""All classes; an event's `cls` is a place here."""

_COLLECTIVES = (
    (r"all_?reduce|multimem_all_reduce|cross_device_reduce|twoshot|oneshot", "all_reduce"),
    (r"reduce_?scatter", "reduce_scatter"),
    (r"all_?gather", "all_gather"),
    (r"all_?to_?all|alltoall", "all_to_all"),
    (r"broadcast|bcast", "broadcast"),
    (r"send_?recv|send|recv|coalesced", "send_recv"),
)
_NCCL = re.compile(r"nccl(?:Dev)?Kernel|nccl(?:AllR|AllG|ReduceS|SendR|Broad|Gener)|rccl|mscclKernel", re.I)
_EXPERT = re.compile(
    r"deep_ep|dpsk::ep|hybrid_?ep|uccl|internode|intranode|(?:ep|moe)_(?:dispatch|combine)_kernel", re.I
)
_OTHER_COMM = re.compile(
    r"multimem_all_reduce|multimem_all_gather|cross_device_reduce|two_shot|one_shot_all|nvshmem|rocshmem|nvls_",
    re.I,
)
_GEMM = re.compile(
    r"nvjet|gemm|gemv|^Cijk_|cublasLt|splitKreduce|splitK_reduce|cutlass_\d|s16816|dot_kernel|scaled_mm|_matmul|"
    r"matmul_kernel|wgmma|triton_tem_fused.*mm", re.I
)  # fmt: skip
_NAMED: tuple[tuple[str, str], ...] = (
    (r"split_embedding|bounds_check_indices|permute_pooled|fbgemm|jagged|batch_?norm|max_?pool|avg_?pool|igemm|"
     r"conv(?:olve|olution|\dd|_depthwise|[._]?[fd]prop)|conv_|cudnn_(?:train|infer)|cudnn::bn|cudnn::detail::|"
     r"wgrad_alg|dgrad_engine|nchwToNhwc|nhwcToNchw|SubTensorOp|Im2|Col2|dropout|miopen|reshape_and_cache|page_indices|pagedKV|winograd|naive_conv|"
     r"upsample|interpolat|lstm|binary_cross", NOT_IN_MODEL),
    (r"GroupProblemShape|grouped_?gemm|group_gemm|GroupedGemm|matmul_ogs|moe.*gemm|gemm.*moe|fused_moe_kernel|"
     r"gemm_fp8_grouped|bmm_.*_(?:swiGlu|Bfloat16_Mx|MxE)|prepare_grouped|grouped_mm|finalize_matmul",
     "grouped_gemm"),
    (r"compute_dot_do_o|convert_dq|fmha_reduce_head|dot_do_o|bwd_(?:pre|post)process|bwd_convert|attn_bwd_(?:pre|post)",
     "attention_pre_post"),
    (r"(?:flash|fmha|attn|attention|mla|sdpa).*(?:bwd|bprop|backward)|bwd.*(?:attn|fmha)",
     "attention_backward"),
    (r"flash|fmha|attention|attn_fwd|sdpa|_mla|mha_fwd|reduce_segments", "attention_forward"),
    (r"selective_scan|chunk_scan|chunk_state|state_passing|ssd_|gated_delta|causal_conv1d|mamba", "scan"),
    (r"mqa_logits|lightning_indexer", "indexer"),
    (r"rotary|rope", "rope"),
    (r"rms_?norm|layer_?norm|GammaBeta|ln_fwd|ln_bwd|rmsnorm|group_?norm|Rmsnorm", "norm"),
    (r"silu|swiglu|gelu|act_and_mul|geglu|swish|relu", "swiglu"),
    (r"nll_loss|cross_entropy|LogSoftMax|log_softmax|loss|cunn_SoftMax|mse_", "loss"),
    (r"gatherTopK|topk|routing|gating|softmax_warp|grouped_topk|bitonicSort|radixSelect|biggest|"
     r"sum_bitmatrix", "topk"),
    (r"adam|sgd_|SGDFunctor|LambStage|lamb_kernel|adagrad|FusedOptimizer|muon_|newton_schulz", "optimizer"),
    (r"LpNorm|lpnorm|clip_grad|l2norm|NormTwoOps", "clip"),
    (r"embedding|compute_grad_weight|sum_and_scatter|krn_partial|partial_segment", "embedding"),
    (r"chunk_cat|split_with_sizes_copy", "fsdp_copy"),
    (r"moe_|permut|index_put|index_elementwise|indexing_backward|gather|scatter|RadixSort|radix_sort|histogram|"
     r"unpermute|align_block|fill_indices|fill_reverse|index_select|indexSelect|index_copy|index_add|"
     r"DeviceScan|DeviceSelect|DeviceReduce|scan_|UniqueByKey|finalize|masked_select|nonzero|cumsum|expand.*row",
     "permute"),
    (r"quant|to_fp8|fp8_cast|cast|per_token|float8|hfp8|FP8row", "cast"),
    (r"transpose", "transpose"),
    (r"FillFunctor|_memset|fill_kernel", "fill"),
    (r"bfloat16_copy_kernel|float16_copy_kernel|float8_copy", "cast"),
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
_TRITON = (
    (r"log_softmax|nll_loss|cross_entropy", "loss"), (r"rms|layer_norm|rsqrt|native_layer", "norm"),
    (r"silu|gelu|swiglu", "swiglu"), (r"embedding", "embedding"), (r"index|scatter|gather|sort", "permute"),
    (r"flex_attention_backward", "attention_pre_post"), (r"softmax|topk|sigmoid", "topk"), (r"cat", "copy"),
    (r"^(?:_?to_copy_?|view|clone|_)*$", "cast"),
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
        if re.search(r"[+*}]\)?[+*{]|\([^)]*[+*][^)]*\)[+*{]", value):
            raise ValueError("a repetition of a repetition could take for ever; write it without")
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
    if _EXPERT.search(name):
        low = name.lower()
        if "notify" in low or "layout" in low or "barrier" in low:
            return "ep_notify"
        if "cast" in low:
            return None
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
                if found in ("all_to_all", "send_recv") or named == "other_communication" != found:
                    return found
    return said if said != "other_communication" else named


def classify(
    name: str, path: tuple[str, ...], activity: int, kind: str = "", rules: Rules | None = None
) -> str:
    """The class of an activity: its name, the operators and annotations around its launch, outermost first.

    A result that begins with "?" is generic arithmetic, which `context` decides by its neighbours.
    """
    for rule in rules.rules if rules else ():
        if re.search(rule.name, name[:2000]) and (
            not rule.launched_by or any(re.search(rule.launched_by, outer[:500]) for outer in path)
        ):
            return rule.cls
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
    if activity:
        return _copied(name, activity, path)
    if re.search(r"convolution|batch_norm|max_pool|fbgemm|split_embedding", joined, re.I):
        return NOT_IN_MODEL
    if _ATTENTION_OP.search(joined):
        named = _by_name(name)
        if named in ("attention_pre_post", "rope", "cast"):
            return named
        if named and named.startswith("attention"):
            return named
        return "attention_backward" if _BACKWARD.search(joined) else "attention_forward"
    if re.search(r"cross_entropy|nll_loss|log_softmax|LogSoftmax|NllLoss", joined):
        return "loss"
    if re.search(r"aten::_?foreach_norm|clip_grad|linalg_vector_norm|aten::_foreach_mul_", joined):
        return "clip"
    if re.search(r"aten::embedding|EmbeddingBackward", joined):
        return "embedding"
    below = " ".join(part for part in path if not part.startswith("autograd::engine"))
    if re.search(r"_norm(?:_backward)?$|rms_?norm|layer_?norm", below, re.I) and "foreach" not in joined:
        return "norm"
    named = _by_name(name)
    return _generic(name, path, inner, joined) if named in (None, "fill", "copy", "cast") else named


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
    for pattern, found in _COMPILED[:3]:
        if pattern.search(name):
            return found
    if (
        _GEMM.search(name)
        and "attention" not in name.lower()
        and not re.search("flash|fmha|sdpa", name, re.I)
    ):
        return "gemm"
    return next((found for pattern, found in _COMPILED[3:] if pattern.search(name)), None)


def _generic(name: str, path: tuple[str, ...], inner: str, joined: str) -> str:
    """Copies, fills and arithmetic, by the operator around them."""
    if "complex" in name or "conj" in name:
        return "rope"
    if re.search(r"aten::(?:index|index_put|_index_put_impl|sort|argsort|gather|scatter|histc|cumsum|topk|"
                 r"bincount|nonzero|masked_select|repeat_interleave|unique)", joined):  # fmt: skip
        return "topk" if "aten::topk" in joined else "permute"
    if (
        re.search(r"aten::(?:zeros|new_zeros|zero_|fill_|full|ones|zeros_like|ones_like)$", inner)
        or "FillFunctor" in name
    ):
        return "?fill"
    if re.search(r"LoadWithCast|bfloat16_copy|float16_copy|float8_copy", name) and "copy" in name:
        return "?cast"
    if "CompiledFunction" in joined and "copy" in name:
        return "copy"
    if "copy_kernel" in name or "direct_copy" in name:
        return "?cast" if re.search(r"aten::(?:_to_copy|to|type|float|half|bfloat16)\b", joined) else "?copy"
    if "CatArray" in name:
        return "?copy"
    if _WHOLE_NUMBERS.search(name):
        return "?integer"
    if re.search(r"aten::(?:softmax|_softmax|topk)|softmax_warp", joined + name):
        return "topk"
    if "aten::sigmoid" in joined:
        return "?sigmoid"
    if inner in ("aten::neg",) or "neg_kernel" in name:
        return "?neg"
    if re.search(r"rsqrt|pow_tensor_scalar|MeanOps", name):
        return "?norm"
    if _ARITHMETIC.search(name):
        return "?elementwise"
    return _by_name(name) or UNCLASSIFIED


def _routes(kinds: list[str], ops: list[str], n: int) -> bool:
    """Whether only scores, casts and sums stand between a GEMM and the choice of experts."""
    for m in range(n + 1, min(n + 8, len(kinds))):
        if kinds[m] == "topk" and ("topk" in ops[m] or not ops[m]):
            return True
        if kinds[m] not in ("topk", "?cast", "?copy", "?elementwise", "?sigmoid", "cast", "?fill", "fill"):
            return False
    return False


def _activates(kinds: list[str], n: int) -> bool:
    """Whether arithmetic stands between two grouped GEMMs with nothing but arithmetic and copies near it."""
    ends = ("grouped_gemm", "gemm", "attention_forward", "attention_backward", *COMMUNICATION)
    before = next((kind for kind in reversed(kinds[max(0, n - 24) : n]) if kind in ends), "")
    after = next((kind for kind in kinds[n + 1 : n + 25] if kind in ends), "")
    return before == after == "grouped_gemm"


def _beside_choice(kinds: list[str], n: int) -> bool:
    """Whether the choice of experts stands shortly before or just behind, and no GEMM between."""
    before = kinds[max(0, n - 8) : n][::-1]
    if "topk" in before and "gemm" not in before[: before.index("topk")]:
        return True
    after = kinds[n + 1 : n + 4]
    return "topk" in after and "gemm" not in after[: after.index("topk")]


def context(kinds: list[str], ops: list[str]) -> list[str]:
    """Decide generic events of one stream, in order of launch, by the classes of their neighbours.

    A negation between multiplications and concatenations is a rotary embedding; a product just after an
    activation, and arithmetic between two grouped GEMMs, belong to the activation; a product and sum around
    a root and a mean belong to a norm; whole numbers, and arithmetic beside the choice of experts, belong to
    the routing; the GEMM that its scores come from is the router's.
    """
    decided = list(kinds)
    count = len(kinds)
    for n, kind in enumerate(kinds):
        if kind == "gemm" and _routes(kinds, ops, n):
            decided[n] = "gate_gemm"
        if kind == "permute" and ops[n] == "aten::gather" and "topk" in kinds[max(0, n - 5) : n]:
            decided[n] = "topk"
        if not kind.startswith("?"):
            continue
        before, after = kinds[max(0, n - 4) : n], kinds[n + 1 : n + 5]
        near = before[-3:] + after[:3]
        if kind == "?integer":
            decided[n] = "permute"
        elif kind == "?neg":
            decided[n] = "rope"
        elif kind == "?norm":
            decided[n] = "clip" if "clip" in near else "norm"
        elif (
            kind in ("?fill", "?copy")
            and "?neg" in kinds[max(0, n - 6) : n + 7]
            and "contiguous" not in ops[n]
        ):
            decided[n] = "rope"
        elif kind == "?fill":
            decided[n] = "permute" if "permute" in after[:2] + before[-1:] else "fill"
        elif kind in ("?elementwise", "?copy") and "?neg" in near and ops[n] != "aten::contiguous":
            decided[n] = "rope"
        elif kind == "?elementwise" and "swiglu" in before and "mul" in ops[n]:
            decided[n] = "swiglu"
        elif kind == "?elementwise" and ("?norm" in near):
            decided[n] = "norm"
        elif kind in ("?elementwise", "?sigmoid") and _activates(kinds, n):
            decided[n] = (
                "elementwise" if before[-1:] == ["?copy"] else "swiglu"
            )  # a bias of experts, copied out
        elif kind in ("?elementwise", "?sigmoid") and _beside_choice(kinds, n):
            decided[n] = "topk"
        elif kind == "?sigmoid":
            decided[n] = "elementwise"
        elif kind == "?copy" and "permute" in after[:2] and n + 1 < count:
            decided[n] = "permute"
        else:
            decided[n] = kind[1:]
    return decided
