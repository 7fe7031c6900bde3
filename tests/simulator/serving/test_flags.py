"""Command lines of engines: what a plan states is there, and what an engine lacks is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import Scenario, load_scenario
from moesim.simulator.serving.flags import serving_flags


def _plan(engine: str, **serving: Any) -> Scenario:
    data = {"engine": engine, "load": {"rate_per_s": 1.0}, "dp": 8, "ep": 8, **serving}
    return load_scenario({"model": "deepseek-v3", "cluster": "h200-1024", "serving": data}, [])


def test_vllm_counts_tp_and_dp_and_names_its_methods() -> None:
    (launch,) = serving_flags(_plan("vllm-0.19", exchange="deepep", draft_tokens=2)).launches
    words = dict(zip(launch.words, launch.words[1:], strict=False))
    assert (words["--tensor-parallel-size"], words["--data-parallel-size"]) == ("1", "8")
    assert words["--all2all-backend"] == "deepep_low_latency"
    assert json.loads(words["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 2}


def test_sglang_counts_all_ranks_together() -> None:
    (launch,) = serving_flags(_plan("sglang-0.5", max_num_seqs=32)).launches
    words = dict(zip(launch.words, launch.words[1:], strict=False))
    assert (words["--tp-size"], words["--dp-size"], words["--max-running-requests"]) == ("8", "8", "256")


def test_tensorrt_llm_gets_a_file(tmp_path: Path) -> None:
    made = serving_flags(_plan("trtllm-1.2", cache="fp8", cuda_graphs=False))
    options = made.launches[0].options
    assert options is not None
    assert options["kv_cache_config"]["dtype"] == "fp8"
    assert options["cuda_graph_config"] is None
    assert sorted(path.name for path in made.write(tmp_path)) == ["serve-options.yaml", "serve.sh"]


def test_waits_and_graphs_of_prefills_are_written_or_named() -> None:
    waits = {"wait_steps": 60, "wait_for_ranks": True, "graph_prefill_tokens": 2048}
    options = serving_flags(_plan("trtllm-1.2", **waits)).launches[0].options
    assert options is not None
    assert options["attention_dp_config"] == {"enable_balance": True, "timeout_iters": 60}
    assert options["torch_compile_config"] == {"enable_piecewise_cuda_graph": True}
    (vllm,), (sglang,) = (
        serving_flags(_plan(name, **waits)).launches for name in ("vllm-0.19", "sglang-0.5")
    )
    assert vllm.words[vllm.words.index("--max-cudagraph-capture-size") + 1] == "2048"
    assert [note.partition(";")[0] for note in (*vllm.notes, *sglang.notes)][:3] == [
        "not used: serving.wait_steps=60",
        "not used: serving.wait_for_ranks",
        "not used: serving.graph_prefill_tokens=2048",
    ]


def test_pools_for_prompts_and_decodes_have_their_own_kernels() -> None:
    pools = {"exchange": "deepep", "prefill": {"dp": 8, "ep": 8, "exchange": "deepep"}}
    decode, prompts = serving_flags(_plan("sglang-0.5", **pools)).launches
    assert "low_latency" in decode.words
    assert "normal" in prompts.words
    assert prompts.words[prompts.words.index("--disaggregation-mode") + 1] == "prefill"


@pytest.mark.parametrize(
    ("engine", "change", "reason"),
    [
        ("vllm-0.19", {"cache": "nvfp4"}, "keeps keys and values"),
        ("trtllm-1.2", {"two_batch_overlap": True, "exchange": "deepep"}, "no overlap of two micro-batches"),
        ("trtllm-1.2", {"tp": 2, "dp": 4}, "data-parallel on all GPUs"),
        ("deepseek-online", {}, "no command line"),
    ],
)
def test_what_an_engine_lacks_is_refused(engine: str, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        serving_flags(_plan(engine, **change))
