"""Everything malformed or illegal ends in one paragraph on stderr, exit code 2, and no file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 1000, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip


Run = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("small_file")  # beside whatever a test breaks


def refused(outcome: Any, folder: Path, *words: str, code: int = 2) -> None:
    """One paragraph with these words on stderr, nothing on stdout, no file but the input.

    On a slow machine lines of progress ("moesim: ... ...") come before it.
    """
    assert outcome.code == code, outcome
    assert outcome.out == ""
    *before, said = outcome.err.splitlines(keepends=True)
    assert all(line.startswith("moesim: ") and line.endswith(" ...\n") for line in before)
    assert said.startswith("moesim: error: ") and said.endswith("\n")
    assert "Traceback" not in said and "internal error" not in said
    for word in words:
        assert word in said, f"{word!r} is not in {said!r}"
    made = {p.name for p in folder.iterdir()} - {"small.yaml", "input.yaml", "config.json", "input.csv"}
    assert not made, f"left behind: {made}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("parallel.epp=8", ("parallel.epp", "unknown key", "'pp'")),
        # wrong units, bare numbers
        ("cluster.price_per_gpu_hour=2 GB/s", ("price_per_gpu_hour", "bandwidth", "price per hour")),
        ("variation.clock_cv=1 GB", ("variation.clock_cv", "1 GB", "fraction")),
        # plans that do not divide
        ("parallel.pp=3", ("parallel.pp=3", "32", "nearest: 2, 4")),
        ("parallel.ep=6", ("parallel.ep=6", "nearest: 4, 8")),
        ("batch.sequences=65", ("65", "nearest: 64, 72")),
        # schedules that the shape cannot run
        ("schedule=dualpip", ("'dualpip'", "dualpipe")),
        ("schedule=absent.csv", ("absent.csv", "No such file")),
        ("batch.sequences=8000000000", ("more than", "this machine", "micro-batches")),
        # names of nothing
        ("model=mixtral-8x7", ("'mixtral-8x7'", "nearest: 'mixtral-8x7b'")),
        ("cluster=h100", ("'h100'", "'h100-1024'")),
        ("profile=none", ("'none'", "h800-trace")),
        ("communication.sms=0", ("communication.sms=0",)),
        ("communication.sms=500", ("communication.sms=500", "131")),
        ("stages.blocks=[dense*3, moe, mtp, moe]", ("stages.blocks.0", "dense", "mixtral-8x22b", "moe")),
        ("seed=" + "9" * 400, ("--set seed", "at most 40 characters")),
        ("seed=0x" + "f" * 5000, ("--set seed", "16 if hexadecimal")),
        ("schedule=!!bool maybe", ("--set schedule", "'maybe'")),
        ("run={[[]]: 1}", ("--set run", "a key must be a text")),
        ("run={2024-01-01: 1}", ("run.2024-01-01", "unknown key")),
        ("name=\udcff", ("--set name", "half of a pair")),
        ('model="a\\0.yaml"', ("--set model", "zero byte")),
        ("model=" + "x" * 5000, ("unknown model", "moesim models")),
        ("profile=" + "x" * 5000 + ".yaml", ("cannot be read",)),
        ("cluster.node.nics_per_gpu=0", ("nics_per_gpu", "0 is outside", "nearest: 1")),
        ("cluster.node.nic_bandwidth=0 GB/s", ("nic_bandwidth", "0 B/s is outside", "nearest: 1 MB/s")),
        ("cluster.node.nic_bandwidth=1e999999 GB/s", ("nic_bandwidth", "out of range", "finite")),
        ("batch.sequence_length=1000000000000000000", ("batch.sequence_length", "100000000")),
        (".".join("a" * 1000) + "=1", ("is no key",)),
        ("model=" + "[" * 1000, ("--set", "model")),
    ],
)
def test_bad_settings(run: Run, tmp_path: Path, setting: str, words: tuple[str, ...]) -> None:
    refused(run("simulate", "small.yaml", "--trace", "out.json", "--set", setting), tmp_path, *words)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        (("parallel.pp=1", "parallel.ep=16"), ("parallel.ep=16", "experts=8", "nearest: 8")),
        (("schedule=dualpipe", "batch.sequences=32"), ("dualpipe", "microbatches=4", "nearest legal")),
        (("model=llama-3-8b",), ("ep=8", "no experts")),
        (("schedule=interleaved-1f1b", "parallel.vpp=2", "batch.sequences=72"), ("interleaved-1f1b", "9")),
        (("parallel.pp=16", "parallel.vpp=8", "parallel.ep=2", "schedule=interleaved-1f1b"), ("56",)),
        (("schedule=dualpipe", "parallel.zero_stage=3", "batch.sequences=128"), ("zero_stage=3", "1f1b")),
    ],
)
def test_plans_that_cannot_run(
    run: Run, tmp_path: Path, settings_: tuple[str, ...], words: tuple[str, ...]
) -> None:
    flags = [part for setting in settings_ for part in ("--set", setting)]
    refused(run("simulate", "small.yaml", "--trace", "out.json.gz", *flags), tmp_path, "small.yaml", *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("empty",)),
        (b"\x00\x01\x02", ("not a text file",)),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", ("not a text file",)),
        (b"name: [1, 2\n", ("not valid YAML", "line")),
        (b"a: &a [x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n", ("alias", "line 2")),
        (b"name: small\n", ("missing", "model", "parallel")),
        (b"a: " + b"x" * 600_000, ("limit", "0.5 MB")),
    ],
)
def test_bad_files(run: Run, tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "input.yaml").write_bytes(content)
    refused(run("simulate", "input.yaml", "--trace", "out.json"), tmp_path, "input.yaml", *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--trace", "t.txt"), ("t.txt", ".json.gz")),
        (("--trace", "absent/t.json"), ("absent", "does not exist")),
        (("--trace-per-rank", "small.yaml"), ("small.yaml", "this is a file")),
        (("--trace-per-rank", "x" * 5000), ("xxx", "cannot be a folder")),
        (("--trace", "t.json", "--ranks", "4"), ("ranks=4", "0 to 3")),
        (("--trace", "t.json", "--members", "0,9"), ("members=9", "0 to 7")),
        (("--ranks", "first"), ("--ranks", "'first'")),
    ],
)
def test_bad_trace_targets(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(run("simulate", "small.yaml", *arguments), tmp_path, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "new", "--as", "perfetto"), ("'perfetto'", "kineto or chakra")),
        (("-o", "small.yaml"), ("small.yaml", "give a folder")),
        (("-o", "absent/t.json", "--ranks", "0"), ("absent", "does not exist")),
        (("-o", "t.et", "--ranks", "0"), ("t.et", ".json")),
        (("-o", "t.json"), ("4 ranks", "folder")),
        (("-o", "new", "--ranks", "32"), ("rank 32", "GPUs 0 to 31")),
        (("-o", "new", "--ranks", "first"), ("--ranks", "'first'")),
    ],
)
def test_bad_exports(run: Run, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("trace", "export", "small.yaml", *arguments), tmp_path, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": ...}, ("num_local_experts", "missing")),
        ({"model_type": "mixtrel"}, ("'mixtrel'", "known families", "--as mixtral")),
        ({"num_hidden_layers": None}, ("num_hidden_layers=null", "whole number")),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "silu")),
        ({"num_hidden_layers": 10**7}, ("num_hidden_layers", "limit")),
        ({"num_attention_heads": 7}, ("num_attention_heads=7", "1024")),
    ],
)
def test_bad_configs(run: Run, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    config = {key: value for key, value in (CONFIG | change).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(run("import", "hf", "config.json", "-o", "model.yaml"), tmp_path, "config.json", *words)
    refused(run("simulate", "small.yaml", "--set", "model=config.json"), tmp_path, "config.json", *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("empty",)),
        (b"{", ("not valid JSON", "line 1")),
        (b'{"model_type": "mixtral", "num_hidden_layers": NaN}', ("NaN", "whole number")),
        (b'{"a": 1}', ("without model_type", "known families")),
        (b"\xff\xfe\x00", ("not a text file",)),
    ],
)
def test_bad_config_files(run: Run, tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refused(run("import", "hf", "config.json", "-o", "model.yaml"), tmp_path, "config.json", *words)


@pytest.mark.parametrize("output", ["model.json", "absent/model.yaml", "."])
def test_bad_model_targets(run: Run, tmp_path: Path, output: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(run("import", "hf", "config.json", "-o", output), tmp_path, "output file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("schedule", "dualpipe", "--pp", "8", "--microbatches", "9"), ("microbatches=9", "16")),
        (("schedule", "2f2b", "--pp", "4", "--microbatches", "9"), ("'2f2b'", "1f1b")),
        (("schedule", "1f1b", "--pp", "99999", "--microbatches", "99999"), ("limit",)),
        (("schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--format", "jsn"), ("'jsn'", "'json'")),
        (("schema", "results"), ("'results'", "'result'")),
        (("models", "deepseek"), ("'deepseek'", "'deepseek-v")),
        (("models", "deepseek-v3", "--search", "moe"), ("--search 'moe'", "not both")),
        (("models", "--search", "x" * 500), ("500 characters", "at most 200")),
        (("hardware", "h800"), ("'h800'", "h800-sxm")),
    ],
)
def test_bad_names_and_sizes(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(run(*arguments), tmp_path, *words)


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("simulate",), ("simulate", "a", "--nonsense"), ("schedule", "1f1b", "--pp", "x")],
)
def test_usage_errors_exit_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and "Usage:" in err and "Traceback" not in err


def test_control_characters_of_foreign_input_are_shown(run: Run, tmp_path: Path) -> None:
    (tmp_path / "input.yaml").write_text('"evil\\e[31m": 1\n')
    outcome = run("simulate", "input.yaml")
    assert "\x1b" not in outcome.err and "evil" in outcome.err


KEYS = ["name", "model", "parallel", "batch.sequences", "stages.layers", "seed", "profile"]
VALUES = st.text(max_size=12) | st.integers().map(str) | st.sampled_from(["{}", "[]", "null", "{a: 1}"])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_no_setting_raises_anything_else(run: Run, key: str, value: str) -> None:
    outcome = run("simulate", "small.yaml", "--set", f"{key}={value}", "--json")
    assert outcome.code in (0, 2, 3), outcome
    assert "internal error" not in outcome.err
