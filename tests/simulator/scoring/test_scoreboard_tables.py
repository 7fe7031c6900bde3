"""Others' tables: words by `spellings.yaml`, numbers, units, and files as spreadsheets write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels import InputError
from moesim.simulator.scoring import file_records, published_records
from moesim.simulator.scoring.scoreboard import OpenRow, open_rows
from moesim.simulator.scoring.scoreboard.plan import left_out, policies_of, precision_of, scenario_of
from moesim.simulator.scoring.scoreboard.plan import sharding_of as sharding_of_row
from moesim.simulator.scoring.scoreboard.rows import FILE
from moesim.simulator.scoring.scoreboard.score import score_row
from moesim.simulator.scoring.scoreboard.shapes import shape_of
from moesim.simulator.scoring.scoreboard.tables import is_table, model_named, read_row, read_rows
from moesim.simulator.scoring.scoreboard.words import (
    degrees_of,
    legal_words,
    read_number,
    read_unit,
    spellings,
)

BASE = {
    "model": "llama3-8b", "seq": "8192", "hardware": "H100-SXM", "n_gpus": "64", "zero_or_fsdp": "zero1",
    "gbs_seqs": "128", "mbs": "1", "precision": "bf16", "recompute": "full", "metric": "step_s", "value": "2",
}  # fmt: skip


def row(**cells: str) -> OpenRow:
    return read_row(BASE | cells, "a")


def test_shipped_rows_are_read_as_they_are() -> None:
    for record, own in zip(published_records(FILE), open_rows(), strict=True):
        read = read_row(record, record["id"])
        assert read == own.model_copy(update={"notes": own.notes.strip()}), own.id


@pytest.mark.parametrize(
    ("column", "text", "word"),
    [
        ("hardware", "H100-96GB (HBM2e, 500W)", "H100-SXM-96GB-HBM2e"),
        ("hardware", "A800/A100", "A100-80GB-SXM"),
        ("hardware", "8x NVIDIA H100-SXM5-80GB", "H100-SXM"),
        ("hardware", "p4d.24xlarge", "A100-40GB-SXM"),
        ("hardware", "DGX GB200 NVL72", "GB200"),
        ("precision", "float8 (tensorwise)", "fp8-cs"),
        ("precision", "float8 (rowwise)", "fp8-rowwise"),
        ("precision", "float8 blockwise", "fp8-blockwise"),
        ("precision", "FP8-SC", "fp8-blockwise"),
        ("precision", "BF16 mixed precision", "bf16"),
        ("precision", "MX-FP8", "mxfp8"),
        ("recompute", "selective per-op", "op"),
        ("recompute", "Selective AC (per op)", "op"),
        ("recompute", "gradient checkpointing", "full"),
        ("recompute", "no activation checkpointing", "none"),
        ("recompute", "\u00d7", "none"),
        ("recompute", "norm,act", "selective"),
        ("recompute", "mla_up_proj, mlp", "selective (mla_up_proj, mlp)"),
        ("schedule", "Interleaved 1F1B", "interleaved-1f1b"),
        ("schedule", "PipeDream-Flush", "1f1b"),
        ("zero_or_fsdp", "ZeRO stage 1", "zero1"),
        ("zero_or_fsdp", "FSDP (full_shard)", "fsdp"),
        ("zero_or_fsdp", "FULL_SHARD", "fsdp"),
        ("zero_or_fsdp", "dp_shard=64", "fsdp2"),
        ("zero_or_fsdp", "dp_shard=-1", "fsdp2"),
        ("zero_or_fsdp", "HSDP 8x8", "fsdp2 shard=8 x dp 8"),
        ("zero_or_fsdp", "FSDP=8", "fsdp shard=8 x dp 8"),
        ("zero_or_fsdp", "FSDP=0", "none"),
        ("zero_or_fsdp", "hybrid shard", "fsdp2 shard=8 x dp 8"),
        ("zero_or_fsdp", "zero1 (size 8)", "zero1"),
    ],
)
def test_words_of_others_become_ours(column: str, text: str, word: str) -> None:
    read = row(**{column: text})
    assert (getattr(read, column), read.unread) == (word, "")


def test_a_list_of_modules_is_one_for_experts() -> None:
    read = row(model="Qwen3 30B-A3B", recompute="norm,act", ep="8")
    assert (read.model, read.arch) == ("qwen3-30b-a3b", "moe")
    assert policies_of(read) == (("layernorm", "moe_act"),)


def test_what_a_word_costs_is_what_the_trainer_does() -> None:
    tensor, rows = (row(precision=f"float8 ({kind})") for kind in ("tensorwise", "rowwise"))
    assert [scenario_of(r, "full").software.fp8_scales for r in (tensor, rows)] == ["current", "current"]
    assert [precision_of(r).tensor_gather for r in (tensor, rows)] == ["fp8", "bf16"]
    assert any("scale a row" in note for note in left_out(rows))
    assert any("A800" in note for note in left_out(row(hardware="A800/A100")))
    assert any("groups of 8" in note for note in left_out(row(zero_or_fsdp="zero1=8")))
    assert sharding_of_row(row(zero_or_fsdp="HSDP 8x8"))[::2] == (3, 8)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            {"hardware": "H100 PCIe"},
            "'H100 PCIe' is not known for 'pcie' (nearest: 'H100-SXM'); known: A100-",
        ),
        ({"precision": "fp6"}, "precision='fp6' is not known (nearest: "),
        ({"recompute": "full, block, 4 layers"}, "'full, block, 4 layers' is not known for 'block 4'"),
        ({"schedule": "1f1c"}, "schedule='1f1c' is not known (nearest: '1f1b')"),
        ({"zero_or_fsdp": "zero++"}, "zero_or_fsdp='zero++' is not known (nearest: 'zero"),
        ({"zero_or_fsdp": "1"}, "write ZeRO-1, FSDP=1 or dp_shard=1"),
        ({"zero_or_fsdp": "ZeRO-7"}, "stages of ZeRO are 0 to 3"),
        ({"zero_or_fsdp": "FSDP=48"}, "shards of 48 GPUs do not fill 64"),
        ({"zero_or_fsdp": "ZeRO-1, TP=8", "tp": "4"}, "tp is 4 in its column and 8 in"),
        ({"metric": "parsecs"}, "metric='parsecs' is not known"),
        ({"value": "0"}, "value='0' is no measurement"),
        ({"value": "fast"}, "'fast' is no number"),
        ({"value": "912 ms"}, "has another unit than the metric"),
        ({"n_gpus": "0"}, "n_gpus='0' is no whole number"),
        ({"vocab": "128k"}, "vocab="),
        ({"heads": "3.5"}, "heads='3.5' is no whole number"),
        ({"arch": "rnn"}, "arch='rnn' is neither dense nor moe"),
        ({"complete": "maybe"}, "complete='maybe' is none of"),
        ({"model": "Lama 3 8B"}, "the shape of Lama 3 8B is not known (nearest: 'llama"),
        ({"metric": "MFU %", "value": "41 %"}, "an MFU without its count of FLOPs was published"),
        ({"hardware": "Trillium"}, "no machine for TPU-v6e"),
        ({"layers": "40"}, "layers of llama3-8b is 40 in the table and 32"),
    ],
)
def test_what_is_unknown_refuses_the_row_with_value_and_nearest(cells: dict[str, str], reason: str) -> None:
    scored = score_row(row(**cells), None)
    assert scored.refused.startswith("a: ") and reason in scored.refused, scored.refused


# -- models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama4-maverick", "llama-4-maverick"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("llama31_70b", "llama3-70b"),
        ("Meta-Llama-3.1-8B", "llama3-8b"),
        ("DeepSeekV3 (671B)", "deepseek-v3"),
        ("DeepSeek-R1", "deepseek-v3"),
        ("Qwen3_30B_A3B", "qwen3-30b-a3b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("gpt-39.1b", "gpt-39.1b"),
        ("MPT 7B", "mpt-7b"),
        ("GLM 4.5 Air", "glm-4.5-air"),
        ("InternLM-7B", "internlm-7b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("Llama 3.1 18B", "Llama 3.1 18B"),
        ("Kimi-K2.5", "kimi-k2.5"),
    ],
)
def test_models_are_known_by_any_spelling(text: str, name: str) -> None:
    assert model_named(text) == name


def test_a_proxy_has_the_first_layers_of_its_model() -> None:
    short = row(model="DeepSeek-V3", layers="12", ep="8")
    shape = shape_of(short)
    assert shape.moe is not None and (shape.n_layers, shape.moe.dense_layers) == (12, (0, 1, 2))
    assert {note.partition(":")[0] for note in left_out(short)} == {
        "multi-token-prediction modules are not mentioned", "a proxy of 12 layers",
    }  # fmt: skip
    assert shape_of(row(model="DeepSeek-V3", layers="12", ep="8", notes="with MTP")).mtp_layers == 1
    assert shape_of(row(model="llama4-maverick", layers="6", ep="8")).layer_counts
    assert shape_of(row(model="Llama 3 70B", layers="8", vocab="128,512")).vocab == 128512


def test_internlm_7b_is_built_from_its_columns() -> None:
    columns = {
        "layers": "32",
        "hidden": "4096",
        "ffn": "11008",
        "heads": "32",
        "kv_heads": "32",
        "vocab": "103168",
    }
    shape = shape_of(row(model="InternLM-7B", **columns))
    assert (shape.vocab, shape.dense_ffn, shape.ffn_gated, shape.tied_embeddings) == (
        103168,
        11008,
        True,
        False,
    )


# -- numbers and units ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.5", 1234.5), ("1.234,5", 1234.5), ("12,5", 12.5), ("1,234", 1234.0), ("~39.5", 39.5),
        ("1 234 567", 1234567.0), ("4.5k", 4500.0), ("1e3", 1000.0), (" 7* ", 7.0), ("1'024", 1024.0),
    ],
)  # fmt: skip
def test_numbers_as_tables_write_them(text: str, number: float) -> None:
    assert read_number(text) == pytest.approx(number)


@pytest.mark.parametrize(
    ("metric", "value", "step_s"),
    [
        ("s/step", "2.5", 2.5),
        ("iteration time (ms)", "2,500", 2.5),
        ("steps/s", "0.4", 2.5),
        ("sec/it", "2.5 s", 2.5),
        ("tokens/s/GPU", "8,192", 2.0),
        ("Tokens/sec/GPU", "8192", 2.0),
        ("TGS", "8.192k", 2.0),
        ("tok/s", "524288", 2.0),
        ("samples/s", "64", 2.0),
        ("samples per second per GPU", "1", 2.0),
        ("k tokens/s/GPU", "8.192", 2.0),
    ],
)
def test_units_lead_to_the_step(metric: str, value: str, step_s: float) -> None:
    assert row(metric=metric, value=value).published_step_s == pytest.approx(step_s)


def test_flops_lead_to_the_step_where_their_convention_is_stated() -> None:
    causal, full = (
        row(metric="TFLOP/s/GPU", value="400", notes=f"{k} attention").published_step_s
        for k in ("causal", "full")
    )
    assert causal is not None and full is not None and 1.0 < full / causal < 1.2
    mfu = row(metric="MFU %", value=f"{40000 / 989.5:.4f} %", notes="causal attention").published_step_s
    assert mfu == pytest.approx(causal, rel=1e-3)
    assert row(metric="TFLOP/s/GPU", value="400").published_step_s is None


def test_degrees_are_read_beside_words() -> None:
    assert degrees_of("TP=8,PP=4 cp2; EP 64")[0] == {"tp": 8, "pp": 4, "cp": 2, "ep": 64}
    read = row(zero_or_fsdp="TP=8,PP=4,VP2 ZeRO-1", schedule="interleaved")
    assert (read.tp, read.pp, read.vpp, read.zero_or_fsdp) == (8, 4, 2, "zero1")


def test_every_spelling_leads_to_a_word_that_is_priced() -> None:
    for column in ("hardware", "precision", "recompute", "schedule", "zero_or_fsdp"):
        vocabulary = getattr(spellings(), column)
        assert {piece for set_ in vocabulary.means for piece in set_.split()} <= vocabulary.words.keys()
    for unit in spellings().metric.units:
        assert read_unit(unit) == spellings().metric.units[unit]
    for word in legal_words(spellings().precision):
        assert precision_of(row(precision=word))


# -- files ------------------------------------------------------------------------------------------------


def table(tmp_path: Path, text: str, encoding: str = "utf-8") -> Path:
    file = tmp_path / "t.csv"
    file.write_bytes(text.encode(encoding))
    return file


def test_spreadsheets_in_any_dress_are_read(tmp_path: Path) -> None:
    text = (
        "Run;Model;GPU;#GPUs;TP size;Zero Stage;Global batch size;MBS;Seq;Dtype;AC;Tokens/sec/GPU;Date;\r\n"
        "one;Llama 3 8B;H100;1.024;2;1;1.024;1;8k;BF16;Full;12.345,5;today;\r\n"
        ";;;;;;;;;;;;;\r\n\r\n"
        "two;Llama 3 8B;H100;8;2;3;16;1;8k;BF16;no;9.000,25;today;\r\n"
    )
    one, two = read_rows(table(tmp_path, text, "utf-8-sig"))
    assert (one.id, one.zero_or_fsdp, one.tp, one.seq, one.value) == ("one", "zero1", 2, 8192, 12345.5)
    assert (two.zero_or_fsdp, two.recompute, two.unread) == ("zero3", "none", "")
    assert one.remarks == ("the column 'Date' is not read",) and "n_gpus" in one.unread


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("model,hardware,value,metric\n", "no row below the header"),
        ("model,hardware,model,value\na,b,c,1\n", "two columns are called 'model'"),
        ("id,model,hardware,value,metric\na,x,H100,1,s\na,y,H100,1,s\n", "1 ids are there more than once"),
        ("model,hardware,value,metric\nx,H100,1\n", "row 1 has another number of cells than the"),
        ("model,hardware,value,metric,precison\nx,H100,1,s,bf16\n", "(nearest: 'precision')"),
        ("model,hardware,GPU,value,metric\nx,H100,H100,1,s\n", "both mean the column hardware"),
        ("model,hardware,value\n\"x,H100,1\n", "not CSV"),
    ],
)  # fmt: skip
def test_a_table_that_is_unclear_is_refused_in_words(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        read_rows(table(tmp_path, text))
    assert reason in str(caught.value) and str(caught.value).startswith("t.csv")


def test_missing_columns_are_cells_that_state_nothing(tmp_path: Path) -> None:
    [read] = read_rows(table(tmp_path, "model\thardware\ts/step\nllama3-8b\tH100\t2\n"))
    assert (read.id, read.published_step_s) == ("row 1", 2.0)
    assert "the sequence length is not stated" in score_row(read, None).refused
    assert not is_table(file_records(table(tmp_path, "a,b\n1,2\n"))[0])
