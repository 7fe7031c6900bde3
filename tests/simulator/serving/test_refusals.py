"""What serving refuses or names instead of reading it in its own way."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import moesim
from moesim.hwmodels.errors import InfeasibleError, InputError

PRESET = "serve-qwen3-30b-a3b-h100"
FEW = "serving.load.requests=20"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"arrival_s,input_tokens,output_tokens\n0,%d,1\n" % 10**30, "line 2"),
        (b"arrival_s,input_tokens,output_tokens\n1e12,1,1\n", "line 2"),
        (b"arrival_s,input_tokens,output_tokens\n0," + b"1" * 200_000 + b",1\n", "field larger"),
        (b'{"timestamp":"1","input_length":1,"output_length":1}\n', "not a number"),
        (b'{"timestamp":NaN,"input_length":1,"output_length":1}\n', "line 1"),
        (b'{"timestamp":0,"input_length":"ten","output_length":1}\n', "not a number"),
        (b'{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[%d]}\n' % 10**30, "too large"),
        (b'{"a":' * 100_000, "line 1"),
        (gzip.compress(bytes(1000))[:12] + bytes(range(256)), "cannot be read"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,1,1\n", "line 2"),
    ],
)
def test_a_log_of_odd_numbers_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    log = tmp_path / "log"
    log.write_bytes(content)
    with pytest.raises(InputError, match=words):
        moesim.serve(PRESET, f"serving.load={{log: {log}}}")


def test_azures_log_of_2024_has_offsets(tmp_path: Path) -> None:
    log = tmp_path / "azure.csv"
    log.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:01.009930+00:00,9,2\n2024-05-10 01:00:02.009930+01:00,9,2\n",
        "utf-8",
    )
    assert moesim.serve(PRESET, f"serving.load={{log: {log}}}").offered_per_s == 1.0


@pytest.mark.parametrize("rate", ["1e-300", "1e-9"])
def test_rates_of_centuries_are_refused(rate: str) -> None:
    with pytest.raises(InputError, match="30 years"):
        moesim.serve(PRESET, FEW, f"serving.load.rate_per_s={rate}")


def test_a_step_holds_a_token_of_each_sequence() -> None:
    with pytest.raises(InputError, match="max_num_seqs=256"):
        moesim.serve(PRESET, FEW, "serving.max_num_batched_tokens=7")


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="48 layers"):
        moesim.serve(PRESET, FEW, "serving.pp=64", "serving.replicas=1", "cluster.nodes=8")


def test_large_buffers_have_their_own_remedy() -> None:
    with pytest.raises(InfeasibleError, match="lower max_num_batched_tokens"):
        moesim.serve(PRESET, FEW, "serving.max_num_batched_tokens=2000000")


def test_what_nobody_measured_is_said() -> None:
    warnings = moesim.serve(
        PRESET, FEW, "serving.weights=nvfp4", "serving.cache=nvfp4", "serving.draft_tokens=9"
    ).warnings
    said = " ".join(warnings)
    assert "does not multiply nvfp4" in said
    assert "reads keys and values in nvfp4" in said
    assert "no layer that drafts" in said
    assert "those of glm-5.2" in said
    assert "for 8 drafts" in said
    assert moesim.serve(PRESET, FEW).warnings == ()


def test_the_format_of_a_model_from_a_file_is_assumed(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(moesim.load(PRESET).shape.model_copy(update={"name": "own"}).model_dump_json(), "utf-8")
    result = moesim.serve(PRESET, FEW, f"model={path}")
    assert any("taken as BF16" in warning for warning in result.warnings)
    assert not moesim.serve(PRESET, FEW, f"model={path}", "serving.weights=fp8").warnings
