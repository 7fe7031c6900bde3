"""What trainers print of their own arguments means the same as their command line."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario import load_scenario
from moesim.simulator.trainers.meaning.understand import Understanding, understand
from moesim.simulator.trainers.reading import read_launch

PRINTED = Path(__file__).with_name("printed")
BASE = "deepseek-v3-2048xh100"
# The command line of the dumps; README.md beside them says how they were made.
DEEPSEEK_V3 = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --q-lora-rank 1536 --qk-head-dim 128
--qk-layernorm --qk-pos-emb-head-dim 64 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58)
--moe-ffn-hidden-size 2048 --moe-router-dtype fp32 --moe-router-score-function sigmoid
--moe-router-bias-update-rate 1e-3 --moe-router-enable-expert-bias --moe-router-topk 8
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-pre-softmax
--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 2048 --moe-aux-loss-coeff 1e-4
--moe-router-load-balancing-type seq_aux_loss --moe-token-dispatcher-type flex --moe-enable-deepep
--seq-length 4096 --max-position-embeddings 4096 --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --normalization RMSNorm --swiglu --moe-grouped-gemm --bf16
--micro-batch-size 1 --global-batch-size 8192 --tensor-model-parallel-size 2
--pipeline-model-parallel-size 8 --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--recompute-granularity selective --recompute-modules mla_up_proj mlp --mtp-num-layers 1
--pipeline-model-parallel-layout Et|(tt|)*30mL --attention-dropout 0.0 --hidden-dropout 0.0
--tokenizer-type NullTokenizer --vocab-size 129280 --transformer-impl transformer_engine
--attention-backend fused --cross-entropy-loss-fusion --cross-entropy-fusion-impl native --lr 1e-4
--train-iters 100 --no-rope-fusion
"""
TITAN = """[model]
name = "deepseek_v3"
flavor = "671B"
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
"""


def meaning(
    path: Path, base: str = BASE, gpus: int | None = None, ignore_unknown: bool = False
) -> Understanding:
    """What a file means over a base."""
    return understand(read_launch(path), load_scenario(base), "x", gpus=gpus, ignore_unknown=ignore_unknown)


def of_text(folder: Path, text: str, name: str = "run.log", base: str = BASE) -> Understanding:
    """What a text means in a file of this name."""
    (folder / name).write_text(text)
    return meaning(folder / name, base)


@pytest.fixture(scope="module")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Understanding:
    """The command line of the dumps on 1,024 GPUs, the vocabulary as the tokenizer pads it."""
    words = shlex.join(DEEPSEEK_V3.replace("--vocab-size", "--padded-vocab-size").split())
    text = f"torchrun --nnodes 128 --nproc_per_node 8 pretrain_gpt.py {words}\n"
    return of_text(tmp_path_factory.mktemp("script"), text, "run.sh")


DUMPS = sorted(path.name for path in PRINTED.glob("megatron-*.log"))


@pytest.mark.parametrize("name", DUMPS)
def test_a_dump_of_every_release_of_megatron_means_its_command_line(
    name: str, command_line: Understanding
) -> None:
    read = meaning(PRINTED / name)
    assert read.scenario == command_line.scenario
    assert {"parallel.pp", "communication.kernels", "recompute", "precision"} <= set(read.keys)
    row = next(row for row in read.rows if row.argument == "--tensor-model-parallel-size")
    assert row.place.startswith(f"{name}, line ")


def test_every_argument_of_a_dump_has_a_row_or_is_counted() -> None:
    launch = read_launch(PRINTED / "megatron-d98e8a64.log")
    counted = sum(int(note.split(": ")[1].split()[0]) for note in launch.notes)
    text = (PRINTED / "megatron-d98e8a64.log").read_text()
    printed = text.index("--- arguments ---") and text.count("\n  ")
    assert len(launch.arguments) - 1 + counted == printed  # one more is the padded vocabulary


def test_prefixes_of_ranks_and_colours_are_no_part_of_a_dump(
    tmp_path: Path, command_line: Understanding
) -> None:
    text = (PRINTED / DUMPS[0]).read_text()
    marked = "".join(f"  3: {line}\n" for line in text.splitlines())
    assert of_text(tmp_path, f"begin\n\x1b[32m{marked}\x1b[0m").scenario == command_line.scenario


def test_an_export_of_wandb_means_the_same(tmp_path: Path, command_line: Understanding) -> None:
    values: dict[str, object] = {"wandb_version": 1, "_wandb": {"value": {"cli_version": "0.19.1"}}}
    for line in (PRINTED / "megatron-d98e8a64.log").read_text().splitlines():
        name, _, value = line.strip().partition(" ")
        if line.startswith("  "):
            values[name] = {"desc": None, "value": yaml.safe_load(value.lstrip(".").strip() or "''")}
    values["padded_vocab_size"] = {"desc": None, "value": 129280}
    read = of_text(tmp_path, yaml.safe_dump(values), "config.yaml")
    assert read.scenario == command_line.scenario


@pytest.mark.parametrize("name", ["torchtitan-0.1.0.log", "torchtitan-0.2.0.log", "torchtitan-0.2.2.log"])
def test_a_logged_configuration_of_torchtitan_means_its_toml(name: str, tmp_path: Path) -> None:
    base = "deepseek-v3-2048xh800"
    expected = of_text(tmp_path, TITAN, "titan.toml", base).scenario
    read = meaning(PRINTED / name, base).scenario
    for key in ("parallel", "batch", "recompute", "precision", "model", "schedule", "software"):
        assert getattr(read, key) == getattr(expected, key), key


def test_a_container_of_megatron_bridge_means_the_command_line(command_line: Understanding) -> None:
    read = meaning(PRINTED / "megatron-bridge-0.4.0.yaml", gpus=1024)
    assert read.scenario.software.framework == "megatron-bridge-0.4"
    assert (
        read.scenario.model_copy(update={"software": command_line.scenario.software}) == command_line.scenario
    )


def test_a_container_in_a_log_is_the_same_and_its_recipe_of_precision_counts(tmp_path: Path) -> None:
    text = (PRINTED / "megatron-bridge-0.4.0.yaml").read_text()
    logged = of_text(tmp_path, f"rank 0 begins\n{text}\ntraining ...\n")
    assert logged.keys == meaning(PRINTED / "megatron-bridge-0.4.0.yaml").keys
    place = next(row.place for row in logged.rows if row.argument == "model.num_moe_experts")
    line = int(place.rpartition(" ")[2])
    assert (tmp_path / "run.log").read_text().splitlines()[line - 1] == "  num_moe_experts: 256"
    quantised = text.replace("  fp8: null\n", "  fp8: hybrid\n", 1).replace(
        "  fp8_recipe: tensorwise\n", "", 1
    )
    assert quantised.index("fp8: hybrid") < quantised.index("\nmodel:"), "the section mixed_precision"
    assert of_text(tmp_path, quantised, "c.yaml").scenario.recipe.linear == "fp8"


def test_the_json_of_deepspeed_gives_batch_stage_and_gpus() -> None:
    launch = read_launch(PRINTED / "deepspeed-0.19.log")
    assert launch.trainer == "deepspeed" and launch.environment == {"WORLD_SIZE": "64"}
    values = {argument.name: argument.value for argument in launch.arguments}
    assert values["zero_optimization.stage"] == 3 and values["train_micro_batch_size_per_gpu"] == 4
    place = next(one.place for one in launch.arguments if one.name == "bf16.enabled")
    assert place == "deepspeed-0.19.log, line 7"


DUMP = (PRINTED / "megatron-core-0.14.0.log").read_text()
FIRST = 1 + next(n for n, line in enumerate(DUMP.splitlines()) if "--- arguments ---" in line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DUMP[: len(DUMP) // 2].rpartition("\n")[0], "do not end, so the dump was cut"),
        (DUMP.replace("  num_layers .", "  layers_were .", 1), "have no num_layers"),
        (DUMP.replace("  bf16", "WARNING: NCCL\n  bf16", 1), "'WARNING: NCCL' stands among the arguments"),
        (DUMP.replace("  bf16 .", "  brand_new_experts .", 1), "'--brand-new-experts' is no argument"),
        (DUMP + DUMP, f"holds 2 runs, so say which one: --run 1: run.log, line {FIRST} "),
        ('Running with configs: {\n "training": {\n', "of torchtitan does not end"),
        ("Running with args: {'a': open('x')}\n", "of torchtitan does not end"),
        ("[INFO] json = {\n", "of DeepSpeed does not end"),
        ("_target_: megatron.bridge.training.config.ConfigContainer\nmodel:\n  a: 1\n", "has no ddp"),
    ],
)
def test_cut_mixed_and_unknown_dumps_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InputError) as raised:
        of_text(tmp_path, text)
    assert expected in str(raised.value) and "run.log, line" in str(raised.value)


def test_one_of_two_runs_is_chosen(tmp_path: Path, command_line: Understanding) -> None:
    (tmp_path / "run.log").write_text(DUMP.replace("size .................... 1\n", "size ... 2\n") + DUMP)
    second = read_launch(tmp_path / "run.log", run=2)
    assert understand(second, load_scenario(BASE), "x").scenario == command_line.scenario
    lines = DUMP.splitlines()
    (tmp_path / "cut.log").write_text("\n".join([*lines[: FIRST + 9], *lines[FIRST - 1 :]]))
    with pytest.raises(InputError, match=f"a second dump begins before the one of line {FIRST} ends"):
        read_launch(tmp_path / "cut.log", run=1)
    with pytest.raises(InputError, match=r"--run 3: run\.log holds 2"):
        read_launch(tmp_path / "run.log", run=3)


def test_unknown_arguments_are_passed_over_and_listed_unless_they_decide(tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    file.write_text(DUMP.replace("  bf16", "  colour_of_logs .... red\n  bf16", 1))
    rows = meaning(file, ignore_unknown=True).rows
    row = next(row for row in rows if row.argument == "--colour-of-logs")
    assert row.kind == "ignored" and "--ignore-unknown" in row.meaning and row.value == "red"
    file.write_text(DUMP.replace("  bf16", "  new_expert_degree .... 4\n  bf16", 1))
    with pytest.raises(InputError, match="by its name since it may decide the plan"):
        meaning(file, ignore_unknown=True)


def test_an_entry_of_wandb_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.yaml, line 2: 'lr' has no `value`"):
        of_text(tmp_path, "wandb_version: 1\nlr: 3\n", "config.yaml")
