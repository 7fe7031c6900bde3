"""Megatron-LM arguments out and in, and the torchtitan snippet."""

from __future__ import annotations

import ast
import random
import shlex
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesim.hwmodels.errors import InputError
from moesim.simulator.model.library import load_model
from moesim.simulator.scenario import Scenario, load_scenario, with_overrides
from moesim.simulator.schedules import SCHEDULES
from moesim.simulator.trainers.megatron.arguments import frequency_text, megatron_arguments
from moesim.simulator.trainers.megatron.layout import (
    expand_layout,
    layers_of_layout,
    layout_text,
    mtp_stage_of_layout,
    parse_frequency,
)
from moesim.simulator.trainers.megatron.read import MegatronImport, import_megatron, read_script
from moesim.simulator.trainers.torchtitan.snippet import torchtitan_snippet

HOME = "deepseek-v3-2048xh800"
LAYERS = (4,) * 15 + (1,)


def spellable(**changed: str) -> Scenario:
    keys = {
        "schedule": "1f1b",
        "recompute": "selective",
        "stages.layers": str(list(LAYERS)),
        "precision": "bf16",
        **changed,
    }
    return load_scenario(HOME, [f"{key}={value}" for key, value in keys.items()])


def read(text: str, tmp_path: Path, base: str = HOME) -> MegatronImport:
    path = tmp_path / "run.sh"
    path.write_text(text)
    scenario = load_scenario(base)
    return import_megatron(path, scenario, scenario.shape)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"parallel.zero_stage": "0"},
        {"parallel.zero_stage": "2"},
        {"parallel.zero_stage": "3", "recompute": "full"},
        {"parallel.tp": "2", "parallel.sequence_parallel": "true", "parallel.microbatch": "2"},
        {"precision": "fp8", "recompute": "none"},
        {"schedule": "interleaved-1f1b", "parallel.vpp": "2", "parallel.pp": "8"},
    ],
)
def test_a_plan_survives_the_round_trip(changed: dict[str, str], tmp_path: Path) -> None:
    scenario = spellable(**changed)
    spelled = megatron_arguments(scenario)
    script = "#!/bin/bash\ntorchrun pretrain_gpt.py \\\n" + spelled.text().split("\n--", 1)[-1].join(
        ["--", ""]
    )
    found = read(script if spelled.unspelled else "torchrun x.py \\\n" + spelled.text(), tmp_path)
    assert found.differs == ()
    again = with_overrides(load_scenario(HOME), found.overrides)
    for key in ("parallel", "schedule", "stages", "recompute", "batch", "precision"):
        assert getattr(again, key) == getattr(scenario, key), key
    assert again.communication.sms == scenario.communication.sms


def _varied(count: int, seed: int) -> list[dict[str, str]]:
    """Overrides of plans that Megatron-LM has words for, of every dimension that it shares with a search."""
    draw = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < count:
        pp, vpp = draw.choice([(2, 1), (4, 1), (8, 1), (16, 1), (4, 2), (8, 2), (8, 4)])
        tp, cp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 4])
        layers = [61 // (pp * vpp)] * (pp * vpp)
        for stage in draw.sample(range(pp * vpp), 61 % (pp * vpp)):
            layers[stage] += 1
        changed = {
            "parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp, "parallel.vpp": vpp,
            "parallel.ep": draw.choice([1, 8, 32, 64]), "parallel.microbatch": draw.choice([1, 2]),
            "parallel.zero_stage": draw.choice([0, 1, 2, 3]), "stages.layers": layers,
            "parallel.sequence_parallel": "true" if tp > 1 else "false",
            "schedule": "interleaved-1f1b" if vpp > 1 else "1f1b", "precision": draw.choice(["fp8", "bf16"]),
            "recompute": draw.choice(["none", "attention", "selective", "full"]),
            "batch.sequences": draw.choice([8192, 15360]),
        }  # fmt: skip
        if changed["parallel.ep"] != 1:  # without experts on other ranks no kernel holds SMs for them
            changed["communication.sms"] = draw.choice([8, 20, 24])
        found.append({key: str(value) for key, value in changed.items()})
    return found


def test_twenty_varied_plans_survive_the_round_trip_as_they_are_printed(tmp_path: Path) -> None:
    base = load_scenario(HOME)
    for number, changed in enumerate(_varied(20, seed=5)):
        scenario = spellable(**changed)
        path = tmp_path / f"{number}.sh"
        path.write_text(megatron_arguments(scenario).text())
        found = import_megatron(path, base, base.shape)
        assert found.differs == (), changed
        assert found.notes == (), changed
        again = with_overrides(base, found.overrides)
        for key in ("parallel", "schedule", "stages", "recompute", "batch", "precision", "communication"):
            assert getattr(again, key) == getattr(scenario, key), (key, changed)


def test_modules_to_compute_again_are_words_of_their_own(tmp_path: Path) -> None:
    words = shlex.split(megatron_arguments(spellable()).text().replace("\\\n", " "), comments=True)
    place = words.index("--recompute-modules")
    assert words[place + 1 : place + 4] == ["layernorm", "mla_up_proj", "moe_act"]
    assert read("x --recompute-granularity selective\n", tmp_path).keys["recompute"] == "attention"
    odd = read("x --recompute-granularity selective --recompute-modules mlp core_attn\n", tmp_path)
    assert odd.keys["recompute"] == "selective" and "core_attn mlp" in odd.notes[0]
    op = " ".join(megatron_arguments(spellable(recompute="op")).unspelled)
    assert "torchtitan" in op
    placed = spellable(**{"routing.eplb": "{redundant_experts: 64}"})
    assert "experts in order" in " ".join(megatron_arguments(placed).unspelled)


def test_what_megatron_cannot_say_is_said() -> None:
    spelled = megatron_arguments(load_scenario(HOME))
    text = " ".join(spelled.unspelled)
    assert "dualpipe" in text and "E5M6" in text and "FP8" in text
    assert "--pipeline-model-parallel-layout" not in spelled.arguments
    assert all(line.startswith(("#", "--")) for line in spelled.text().splitlines())


def test_variables_arrays_and_unknown_arguments(tmp_path: Path) -> None:
    found = read(
        """#!/bin/bash
# --expert-model-parallel-size 999 in a comment
TP=2
export EP=${EP:-64}
MODEL_ARGS=(
    --tensor-model-parallel-size $TP --sequence-parallel
    --lr 1e-4   # a learning rate
    --data-path "my data"
)
EXTRA="--pipeline-model-parallel-size 8 --no-such-flag"
torchrun --nproc_per_node=8 pretrain_gpt.py \\
    --expert-model-parallel-size ${EP} --micro-batch-size=1 \\
    ${MODEL_ARGS[@]} $EXTRA && echo done
""",
        tmp_path,
    )
    assert found.keys["parallel.tp"] == 2
    assert found.keys["parallel.pp"] == 8
    assert found.keys["parallel.ep"] == 64
    assert found.keys["parallel.microbatch"] == 1
    assert found.keys["parallel.sequence_parallel"] is True
    listed = " ".join(found.ignored)
    assert all(
        word in listed
        for word in ("--lr 1e-4", "--data-path my data", "--no-such-flag", "--nproc_per_node 8")
    )
    assert "999" not in listed


def test_every_argument_is_understood_compared_or_listed(tmp_path: Path) -> None:
    script = tmp_path / "all.sh"
    script.write_text("x \\\n--tensor-model-parallel-size 1 --hidden-size 7168 --foo 1 --bar=2 --baz\n")
    arguments = read_script(script)
    scenario = load_scenario(HOME)
    found = import_megatron(script, scenario, load_model("deepseek-v3"))
    assert len(arguments) == 5
    assert found.ignored == ("--foo 1", "--bar 2", "--baz")


def test_another_model_is_noticed(tmp_path: Path) -> None:
    found = read("x --hidden-size 4096 --num-layers 61 --moe-layer-freq '([0]*1+[1]*60)'\n", tmp_path)
    assert len(found.differs) == 2
    assert any("--hidden-size" in line and "4096" in line and "7168" in line for line in found.differs)


def test_a_model_zoo_file(tmp_path: Path) -> None:
    path = tmp_path / "v3.yaml"
    path.write_text(
        "ENV_VARS: {TP: 1}\nMODEL_ARGS:\n  --tensor-model-parallel-size: ${TP}\n"
        "  --pipeline-model-parallel-size: 16\n  --num-virtual-stages-per-pipeline-rank: 2\n"
        "  --sequence-parallel: false\n  --use-distributed-optimizer: true\n"
        "  --pipeline-model-parallel-layout: Et*3|(tt|)*29,m|L\n  --overlap-moe-expert-parallel-comm: true\n"
    )
    scenario = load_scenario(HOME)
    found = import_megatron(path, scenario, load_model("deepseek-v3"))
    assert found.keys["parallel.vpp"] == 2 and found.keys["schedule"] == "interleaved-1f1b"
    assert found.keys["parallel.zero_stage"] == 1 and found.keys["parallel.sequence_parallel"] is False
    assert found.keys["stages"] == {"layers": [3, *[2] * 29, 0, 0], "mtp": -2}
    assert not any("balanced" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x --tensor-model-parallel-size $UNSET\n", "UNSET"),
        ("x --tensor-model-parallel-size $((2*4))\n", "--tensor-model-parallel-size"),
        ("x --micro-batch-size\n", "--micro-batch-size"),
        ("x --lr 'unbalanced\n", "line 1"),
        ("echo nothing\n", "no --argument"),
        ("x --recompute-granularity some\n", "some"),
        ("x --use-megatron-fsdp --data-parallel-sharding-strategy all\n", "all"),
        ("x --pipeline-model-parallel-layout 'Et|'q\n", "'q'"),
        ("x --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 'Et|tL'\n", "2 stages"),
        ("x --moe-layer-freq '[0]*3+__import__'\n", "__import__"),
        ("x --moe-layer-freq '[0,0,0]*9999+[1]*9999'\n", "more than 10,000"),
        ("x --pipeline-model-parallel-layout 'Et*9999|t*9999L'\n", "more than 10,000 letters"),
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "python x --lr $A\n", "'$A' makes a text of more than"),
        ('A="--x y"\n' + 'A="$A $A"\n' * 40 + "python x $A\n", "'$A' makes a text of more than"),
        ("x --lr " + "1" * 40_000, "longer than the limit"),
        ("A='" + "1 " * 10_000 + "'\nx --lr $A $A", "--lr: its values"),
    ],
)
def test_malformed_scripts_name_the_argument(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(text, tmp_path)
    assert named in str(caught.value)


def test_unreadable_scripts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_script(tmp_path / "missing.sh")
    binary = tmp_path / "binary.sh"
    binary.write_bytes(b"\xff\xfe--x 1")
    with pytest.raises(InputError, match="not a text file"):
        read_script(binary)
    large = tmp_path / "large.sh"
    large.write_text("#" * 300_001)
    with pytest.raises(InputError, match="larger"):
        read_script(large)


@pytest.mark.parametrize(
    "text", ["MODEL_ARGS: [a]\n", "MODEL_ARGS: 3\n", "MODEL_ARGS: {--a: 1}\nENV_VARS: [b]\n"]
)
def test_a_model_zoo_file_of_another_shape(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.yaml: (MODEL_ARGS|ENV_VARS)=.* must be a mapping"):
        read_script(path)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 2), st.integers(1, 3))
def test_layouts_are_written_as_they_are_read(layers: list[int], mtp: int, behind: int) -> None:
    layers = [*layers, *[0] * (behind - 1)]
    text = layout_text(layers, mtp, -behind)
    assert layers_of_layout(text) == (len(layers), tuple(layers))
    assert mtp_stage_of_layout(text) == (-behind if mtp and behind > 1 else None)
    stages = expand_layout(text).split("|")
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    assert stages[-behind].removesuffix("L").endswith("m" * mtp)


@pytest.mark.parametrize(
    ("text", "layers", "mtp"),
    [
        ("Et*3|(tt|)*29,m|L", (3, *(2,) * 29, 0, 0), -2),
        ("E|(t|)*94L", (0, *(1,) * 94, 0), None),
        ("Ettt|(tt|)*28t|mL", (3, *(2,) * 28, 1, 0), None),
        ("E||tttt|tm|L", (0, 0, 4, 1, 0), -2),
    ],
)
def test_published_layouts_are_read(text: str, layers: tuple[int, ...], mtp: int | None) -> None:
    assert layers_of_layout(text) == (len(layers), layers)
    assert mtp_stage_of_layout(text) == mtp
    again = layout_text(layers, text.count("m"), mtp)
    assert expand_layout(again) == expand_layout(text)


@pytest.mark.parametrize("text", ["t|EL", "Et|L|t", "Em|tL", "Etm|mL", "Et|t", "tL"])
def test_layouts_out_of_order_are_left_out(text: str) -> None:
    assert layers_of_layout(text)[1] is None


def test_a_layout_with_mtp_alone_is_imported(tmp_path: Path) -> None:
    layout = "--pipeline-model-parallel-layout 'Et*3|(tt|)*29,m|L'"
    found = read(f"torchrun pretrain.py --pipeline-model-parallel-size 8 {layout}\n", tmp_path)
    assert found.keys["stages"] == {"layers": [3, *[2] * 29, 0, 0], "mtp": -2}
    assert found.keys["parallel.vpp"] == 4


@given(st.text(alphabet="EtmL|()*,0123456789 ", max_size=30))
def test_any_layout_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert set(expand_layout(text)) <= set("EtmL|")


def test_experts_are_split_like_the_rest_unless_the_script_says_otherwise(tmp_path: Path) -> None:
    """Megatron-LM's default for the tensor parallelism of experts is that of the other layers."""
    found = read("torchrun pretrain.py --tensor-model-parallel-size 4\n", tmp_path)
    assert found.keys["parallel.expert_tp"] == 4
    found = read(
        "torchrun pretrain.py --tensor-model-parallel-size 4 --expert-tensor-parallel-size 1\n", tmp_path
    )
    assert found.keys["parallel.expert_tp"] == 1
    dense = load_scenario(HOME, ["model=llama-3-8b", "parallel.ep=1"])
    path = tmp_path / "dense.sh"
    path.write_text("torchrun pretrain.py --tensor-model-parallel-size 4\n")
    assert "parallel.expert_tp" not in import_megatron(path, dense, dense.shape).keys


@given(st.lists(st.integers(0, 1), min_size=1, max_size=80))
def test_frequencies_are_written_as_they_are_read(flags: list[int]) -> None:
    assert parse_frequency(frequency_text(flags), len(flags)) == tuple(flags)


def test_a_frequency_number_counts_layers() -> None:
    assert parse_frequency("2", 5) == (1, 0, 1, 0, 1)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_torchtitan_snippets_are_python(name: str) -> None:
    vpp = "2" if SCHEDULES[name].free_vpp else "1"
    layers = str([4] * 15 + [1]) if name not in ("zbv", "dualpipev") else str([2] * 30 + [1])
    scenario = spellable(**{"schedule": name, "parallel.vpp": vpp, "stages.layers": layers})
    text = torchtitan_snippet(scenario)
    assigned = {ast.unparse(node.targets[0]) for node in ast.parse(text).body if isinstance(node, ast.Assign)}
    assert "config.parallelism" in assigned and "config.training.seq_len" in assigned
    theirs = SCHEDULES[name].names_elsewhere.get("torch")
    assert f"schedule {name}: torch.distributed.pipelining has none" in text or f'"{theirs}"' in text
    assert (theirs is None) == (name in ("zb-h1", "dualpipe"))
    if theirs is not None:
        parts = ast.literal_eval(text[text.index("[\n") : text.index("    ],\n") + 5])
        assert [len([n for n in part if n.startswith("layers.")]) for part in parts] == ast.literal_eval(
            layers
        )


def test_arguments_are_quoted_for_the_shell() -> None:
    words = shlex.split(megatron_arguments(spellable()).text().replace("\\\n", " "), comments=True)
    assert words[words.index("--moe-layer-freq") + 1] == "([0]*3+[1]*58)"
