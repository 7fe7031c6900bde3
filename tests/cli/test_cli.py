from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.hwmodels.errors import InputError
from moesim.simulator.model.catalogue import load_model
from moesim.simulator.model.huggingface import import_hf
from moesim.simulator.predict.result import Result
from moesim.simulator.run.report import RunReport
from moesim.simulator.schedules import build, from_csv, from_json, to_csv, to_json

MIXTRAL = {
    "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 4096,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 1000, "tie_word_embeddings": False, "sliding_window": None,
    "rope_theta": 1e6, "initializer_range": 0.02,
}  # fmt: skip


Run = Callable[..., Any]


def test_simulate_prints_the_answer(run: Run, small_file: str) -> None:
    code, out, err = run("simulate", small_file)
    assert code == 0 and err == ""
    assert 20 <= len(out.splitlines()) <= 30
    for word in (
        "small: mixtral-8x22b on 32 x", "step time", "bounds", "tokens/s/GPU", "causal", "GPU-hours", "$",
        "GiB on the fullest GPU", "bubble", "critical path", "assumed (", "extrapolated (",
    ):  # fmt: skip
        assert word in out


def test_simulate_json_is_the_result_object_and_the_same_every_time(run: Run, small_file: str) -> None:
    first, second = run("simulate", small_file, "--json"), run("simulate", small_file, "--json")
    assert first.out == second.out and first.code == second.code == 0
    result = Result.model_validate_json(first.out)
    assert first.out == result.model_dump_json(indent=2) + "\n"
    assert result.step.lower_bound_s <= result.step.time_s <= result.step.upper_bound_s


def test_set_and_seed_reach_the_scenario(run: Run, small_file: str) -> None:
    base = json.loads(run("simulate", small_file, "--json").out)
    seeded = json.loads(run("simulate", small_file, "--json", "--seed", "7").out)
    assert seeded["seed"] == 7 and seeded["step"]["time_s"] != base["step"]["time_s"]
    fewer = json.loads(run("simulate", small_file, "--json", "--set", "batch.sequences=32").out)
    assert fewer["step"]["tokens"] * 2 == base["step"]["tokens"]


def test_a_plan_that_does_not_fit_is_printed_and_exits_with_3(run: Run, small_file: str) -> None:
    plan = ("--set", "parallel.zero_stage=0", "--set", "recompute=none")
    code, out, err = run("simulate", small_file, *plan)
    assert code == 3 and "DOES NOT FIT" in out
    assert err.startswith("moesim: error: small: does not fit") and err.count("\n") == 1
    code, out, err = run("simulate", small_file, "--json", *plan)
    assert code == 3 and json.loads(out)["memory"]["fits"] is False
    assert run("explain", small_file, *plan).code == 3


def test_a_plan_at_risk_says_what_the_risk_is(run: Run, small_file: str) -> None:
    memory = Result.model_validate_json(run("simulate", small_file, "--json").out).memory
    between = f"{(memory.total_bytes + memory.range_bytes[1]) / 2.0**31:.2f} GiB"
    code, out, _ = run("simulate", small_file, "--set", f"cluster.node.accelerator.hbm={between}")
    assert code == 0 and "AT RISK" in out
    assert "risk        its tensors fit, but framework and allocator may take up to" in out
    assert "which is slow (the interval of the step" in " ".join(out.split())
    assert "\nrisk " not in run("simulate", small_file).out


def test_traces_are_written(run: Run, small_file: str, tmp_path: Path) -> None:
    shown = ("--ranks", "0,2-3", "--trace-per-rank", "new/ranks")
    code, out, err = run("simulate", small_file, "--json", "--trace", "t.json.gz", *shown)
    assert code == 0 and json.loads(out)
    assert "wrote t.json.gz" in err and "wrote 3 files in new/ranks" in err
    packed = (tmp_path / "t.json.gz").read_bytes()
    trace = json.loads(gzip.decompress(packed))
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 16, 24}, "GPU numbers of pipeline ranks 0, 2, 3"
    assert sorted(p.name for p in (tmp_path / "new" / "ranks").iterdir()) == [
        f"rank-000{gpu}.json.gz" for gpu in ("00", "16", "24")
    ]
    run("simulate", small_file, "--trace", "again.json.gz", "--ranks", "0,2-3")
    assert (tmp_path / "again.json.gz").read_bytes() == packed
    run("simulate", small_file, "--trace", "all.json", "--ranks", "0", "--members", "all")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(8))


def test_a_step_is_exported(run: Run, small_file: str, tmp_path: Path) -> None:
    code, _, err = run("trace", "export", small_file, "-o", "new", "--as", "chakra", "--ranks", "0,8")
    assert code == 0 and "wrote 3 files in new" in err, err
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "comm_groups.cfg",
        "step.0.et",
        "step.8.et",
    ]


def test_schedule_in_three_formats(run: Run) -> None:
    size = ("dualpipe", "--pp", "4", "--microbatches", "8")
    schedule = build("dualpipe", 4, 8)
    text = run("schedule", *size)
    assert text.code == 0 and "dualpipe: 4 ranks" in text.out and "at most 5" in text.out
    code, out, _ = run("schedule", *size, "--format", "json")
    assert code == 0 and out == to_json(schedule) + "\n" and from_json(out).ranks == schedule.ranks
    assert json.loads(out).keys() == {"name", "pp", "microbatches", "ranks"}
    code, out, _ = run("schedule", *size, "--format", "csv")
    assert code == 0 and out == to_csv(schedule) and from_csv(out).ranks == schedule.ranks
    deep = run(
        "schedule", "interleaved-1f1b", "--pp", "2", "--microbatches", "4", "--vpp", "2", "--format", "json"
    )
    assert "3F0" in deep.out


def test_models(run: Run) -> None:
    code, out, _ = run("models", "deepseek-v3")
    assert code == 0 and "671,026,419,200" in out and "kv_lora_rank: 512" in out
    one = json.loads(run("models", "deepseek-v3", "--json").out)
    listed = {model["name"]: model for model in json.loads(run("models", "--json").out)}
    assert one["parameters_total"] == sum(one["parameters_by_component"].values())
    assert one["parameters_total"] == listed["deepseek-v3"]["parameters_total"]
    assert listed["deepseek-v3"]["context"] == 163_840
    assert {part["part"] for part in one["priced_from"]} == {"projections", "mla", "router", "experts"}


def test_models_are_searched_and_name_what_prices_them(run: Run) -> None:
    code, out, _ = run("models", "--search", "gated_delta <100B")
    assert code == 0 and "36 gated_delta, 12 gqa" in out and "256 K" in out
    assert "mixtral" not in out and "2 of " in out
    assert "measured: projections" in run("models", "--search", "mixtral", "--profile", "h200-8gpu").out
    assert "assumed: projections" in run("models", "--search", "dbrx", "--profile", "generic-roofline").out
    assert run("models", "--search", "nomodelhasthisname").out.startswith("no shipped model has")
    assert json.loads(run("models", "--search", "nomodelhasthisname", "--json").out) == []


def test_a_hybrid_model_shows_its_layers_and_states(run: Run) -> None:
    code, out, _ = run("models", "qwen3-next-80b-a3b")
    assert code == 0 and "12 x (3 moe/linear, 1 moe/full)" in out
    assert "published 80B (-0.41% counted by the same rule), 3B activated" in out
    states = {line.split()[0]: line.split() for line in out.splitlines() if line[:6] in ("linear", "full  ")}
    assert states["linear"][2] == "36" and states["linear"][3:5] == ["0", "B"]
    assert states["full"][2] == "12" and states["full"][3:5] == ["24", "KiB"]
    assert "ai-dynamo/aiconfigurator" not in out and "Qwen/Qwen3-Next-80B-A3B-Instruct config.json" in out


def test_hardware(run: Run) -> None:
    code, out, _ = run("hardware", "h800-sxm")
    assert code == 0 and "peak.bf16" in out and "989" in out
    rows = json.loads(run("hardware", "h800-sxm", "--json").out)
    assert all(row["source"] and row["kind"] for row in rows)
    listed = {row["name"]: row for row in json.loads(run("hardware", "--json").out)}
    assert listed["mtt-s5000"]["missing"].startswith("compute_units")
    assert listed["mtt-s5000"]["confidence"] == "peak-only (generic-roofline)"


def test_confidence_is_printed_and_an_engine_is_told(run: Run, small_file: str) -> None:
    code, out, _ = run("simulate", small_file)
    assert (
        code == 0
        and "\nconfidence measured: bf16 products from the rate tables of profile h200-measured\n" in out
    )
    machine = ("--set", "cluster=tpu-v5e-256-pod", "--set", "communication.sms=20")
    code, _, err = run("simulate", "deepseek-v3-2048xh800", *machine)
    assert code == 2 and "a dedicated engine (ICI remote DMA)" in err and "set communication.sms=0" in err
    single = ("--set", "cluster=m3-ultra-single", "--set", "profile=generic-roofline")
    code, _, err = run("simulate", "deepseek-v3-2048xh800", *single, "--set", "schedule=1f1b",
                       "--set", "parallel.pp=1", "--set", "parallel.ep=1")  # fmt: skip
    assert code == 2 and "'m3-ultra' has no peak." in err


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    words = "engine", "compiled code", "kept predictions"
    for word in (*words, "moesim", "python", "numpy", "numba", "GPU", "ptxas", "h800-trace"):
        assert word in out
    assert json.loads(run("doctor", "--json").out)["moesim"] == moesim.__version__


def test_import_hf(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    code, out, err = run("import", "hf", "config.json", "-o", "model.yaml")
    assert code == 0 and "wrote model.yaml" in err
    assert "num_local_experts" in out and "ignored" in out and "initializer_range" in out
    shape = load_model(tmp_path / "model.yaml")
    assert shape.moe is not None and shape.moe.experts == 8
    code, out, _ = run("import", "hf", "config.json", "--json")
    told = json.loads(out)
    assert code == 0 and told["parameters_total"] > told["parameters_activated"] > 0
    assert "initializer_range" in told["ignored"]
    assert shape.numerics is not None and shape.numerics.rope_theta == 1e6
    assert [p.name for p in tmp_path.iterdir()].count("model.yaml") == 1


def test_import_hf_reads_a_renamed_model_as_its_family(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(MIXTRAL | {"model_type": "new_mix", "architectures": ["New"]})
    )
    refused = run("import", "hf", "config.json")
    assert refused.code == 2 and "--as mixtral" in refused.err and "num_local_experts" in refused.err
    code, out, _ = run("import", "hf", "config.json", "--as", "mixtral", "--json")
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert code == 0
    assert json.loads(out)["shape"] == json.loads(run("import", "hf", "config.json", "--json").out)["shape"]
    wrong = run("import", "hf", "config.json", "--as", "mixtrel")
    assert wrong.code == 2 and "nearest: 'mixtral'" in wrong.err


def test_validate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from moesim.simulator.scoring import published as validation
    from moesim.simulator.scoring import published_collectives as validation_collectives
    from moesim.simulator.scoring import published_full_resolution as full_resolution

    row = {"source": "a paper", "quantity": "time per step", "unit": "s", "used_for_calibration": False}
    numbers = {"published": 20.0, "predicted": 19.0, "relative_error": -0.05}
    rows = [validation.Row.model_validate({"id": id_, **row, **numbers}) for id_ in ("a", "b")]
    place = validation.Placement(name="even", layers=(2, 1), time_s=19.5, relative_to_default=0.026)
    monkeypatch.setattr(validation, "score", lambda progress: rows)
    monkeypatch.setattr(validation, "placement_sensitivity", lambda scenario, progress: [place])
    ring = validation_collectives.CollectiveRow(
        id="r", use="scored", group="rings", source="a log", unit="s", measured=2e-3, predicted=1.5e-3,
        relative_error=-0.25, how="ring Simple",
    )  # fmt: skip
    monkeypatch.setattr(validation_collectives, "score_collectives", lambda: [ring])
    same = full_resolution.Difference("networks.step", "step on two networks", "a paper", 0.0, 0.001, 0.005)
    checks = full_resolution.FullChecks((same,), (), "a trace")
    monkeypatch.setattr(full_resolution, "check_full", lambda progress: checks)  # it has tests of its own
    code, out, _ = run("validate")
    assert code == 0 and "+0.10 %" in out and "holds" in out
    assert "-5.0 %" in out and "[1] a paper" in out and "+2.6 %" in out
    assert "rings" in out and "-25.0 %" in out
    printed = json.loads(run("validate", "--json").out)
    assert printed[:2] == [{"id": id_, **row, **numbers} for id_ in ("a", "b")]
    assert printed[2]["id"] == "collectives.r" and printed[2]["relative_error"] == -0.25


STOPS = [
    *("--set", "run.failures=llama3-16k-h100", "--set", "run.restart=megascale"),
    *("--set", "run.checkpoint={interval: optimal, storage: llama3-tectonic}"),
    *("--set", "run.start=2026-12-01", "--set", "run.spares={count: 2, repair: 3 days}"),
]


def test_run_prints_the_whole_run(run: Run, small_file: str) -> None:
    code, out, _ = run("run", small_file, *STOPS, "--set", "run.phases=[{name: tuning, gpu_hours: 2 kGPU-h}]")
    assert code == 0
    for word in (
        "small, the whole run on 32 GPUs", "with stops", "main", "tuning", "as stated",
        "finish      predicted", "P90", "how sure", "95 % by", "goodput",
        "interruptions", "restart", "Young", "Daly", "faulty GPU", "$", "assumed: ",
    ):  # fmt: skip
        assert word in out
    plain = run("run", small_file, "--set", "run.failures=none").out
    assert "no failures are modelled" in plain and "finish" in plain


def test_run_json_is_the_report_and_simulate_shows_it_too(run: Run, small_file: str) -> None:
    first = run("run", small_file, *STOPS, "--json")
    report = RunReport.model_validate_json(first.out)
    assert first.code == 0 and first.out == report.model_dump_json(indent=2) + "\n"
    assert report.step_factor is not None and len(report.outlook) == 21
    sure = Result.model_validate_json(run("simulate", small_file, *STOPS, "--uncertainty", "--json").out)
    assert report.inputs == sure.inputs
    assert sure.run.report == report.model_copy(update={"inputs": None})
    plain = Result.model_validate_json(run("simulate", small_file, *STOPS, "--json").out).run.report
    assert plain is not None and plain.step_factor is None and plain.phases == report.phases
    shown = run("simulate", small_file, *STOPS).out
    assert "the whole run" in shown and "intervals hold stops only" in shown


def test_run_draws_one_run_and_writes_its_events(run: Run, small_file: str, tmp_path: Path) -> None:
    picture, table, trace = (tmp_path / name for name in ("run.html", "run.csv", "run.json"))
    files = ("--gantt", str(picture), "--events", str(table))
    tokens = ("--set", "run.tokens=1e12")
    assert run("run", small_file, *STOPS, *tokens, *files).code == 0
    assert run("run", small_file, *STOPS, *tokens, "--gantt", str(trace)).code == 0
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert rows[0]["begin_s"] == "0.0" and {"training", "restart"} <= {row["what"] for row in rows}
    assert picture.read_text("utf-8").count("<rect") == len(rows)
    assert sum(event["ph"] == "X" for event in json.loads(trace.read_text("utf-8"))["traceEvents"]) == len(
        rows
    )
    assert run("run", small_file, *STOPS, *tokens, *files).code == 2  # neither file is replaced unasked
    refused = run("run", small_file, "--set", "run.failures=none", "--events", str(tmp_path / "none.csv"))
    assert refused.code == 2 and "nothing stops this run" in refused.err
    assert run("run", small_file, "--gantt", str(tmp_path / "run.png")).code == 2


def test_a_run_that_never_finishes_exits_with_3(run: Run, small_file: str) -> None:
    code, out, err = run("run", small_file, *STOPS, "--set", "run.failures={interruptions: 9000 /node-day}")
    assert (code, out) == (3, "")
    assert "small.yaml: the run never finishes in practice" in err and "Traceback" not in err


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"moesim {moesim.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    for command in ("simulate", "run", "schedule", "validate", "explain", "models", "hardware", "import"):
        assert command in out
    assert run("import", "hf", "--help").code == 0


def test_progress_goes_to_stderr_after_two_seconds(
    run: Run, small_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moesim.cli import console as cli_console

    assert run("simulate", small_file, "--json").err == ""
    monkeypatch.setattr(cli_console, "QUIET_S", 0.01)
    with cli_console.working("counting") as say:
        time.sleep(0.2)
        say("still counting")
    out, err = capsys.readouterr()
    assert out == "" and "counting" in err and "still counting" in err


HELPS = """
import sys
from typer.main import get_command
from moesim.cli import app, main
def show(*words):
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, words
def loaded(names):
    return [name for name in names.split() if name in sys.modules]
show()
heavy = loaded("simpy networkx numpy pydantic rich yaml moesim.simulator moesim.kernels")
commands = get_command(app).commands.keys() - {"import"}  # its commands are a registry of moesim.kernels
for name in commands:
    show(name)
heavy += loaded("simpy networkx numpy rich moesim.simulator moesim.app")
sys.exit(f"loaded {heavy} for {len(commands)} commands" if heavy or len(commands) < 15 else 0)
"""


def test_help_loads_no_simulator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELPS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


LOADED = """
import sys
from moesim.cli import main
try:
    main(["run", sys.argv[1]])
except SystemExit as end:
    assert not end.code
sys.stdout = sys.__stderr__
print("\\n".join(name for name in sys.modules if not name.startswith("_")), file=sys.stderr)
"""


@pytest.mark.long
def test_a_run_loads_few_modules() -> None:
    small = Path(__file__).parents[1] / "golden" / "scenario-small.yaml"
    command = [sys.executable, "-c", LOADED, str(small)]
    environment = {**os.environ, "MOESIM_CACHE": "off"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.split()
    ours = [name for name in loaded if name.split(".")[0] == "moesim"]
    assert 100 < len(ours) <= 240, len(ours)
    unused = {"networkx", "scipy", "numba", "streamlit", "asyncio", "webbrowser"}
    assert not unused & set(loaded)


def test_explain(run: Run, small_file: str) -> None:
    code, out, _ = run("explain", small_file)
    assert code == 0
    for word in (
        "critical path",
        "mean*",
        "memory: The fullest GPU holds",
        "bounds",
        "stage 0:",
        "assumed: ",
        "extrapolated",
        "scenario.variation.clock_cv = 0.01",
    ):
        assert word in out
    assert "\n  stages 1 to 2: 14 moe\n" in out, "equal stages share a line"
    path, costs = out.split("what each cause costs")
    shares = [
        float(line.split()[-2]) for line in path.splitlines() if line.endswith(" %") and line.count("  ")
    ]
    assert sum(shares) == pytest.approx(100.0, abs=1.0), "the critical path covers the step"
    for word in ("payloads of dispatch and combine", "all of them", "do not add up"):
        assert word in costs
    without = run("explain", small_file, "--no-counterfactuals")
    assert without.code == 0 and "what each cause costs" not in without.out


# -- small texts -------------------------------------------------------------------------------------


CONFIG = Path(__file__).parents[1] / "golden" / "models" / "mixtral-8x7b-v0.1.json"


def config_in(folder: Path, **more: str) -> Path:
    folder.mkdir(parents=True)
    data = {key: value for key, value in json.loads(CONFIG.read_text()).items() if key != "_name_or_path"}
    (folder / "config.json").write_text(json.dumps(data | more))
    return folder / "config.json"


def test_a_model_is_not_named_after_the_folder_of_its_config(tmp_path: Path) -> None:
    assert import_hf(config_in(tmp_path / "Downloads")).shape.name == "mixtral-46.7b"
    stated = config_in(tmp_path / "a", _name_or_path="mistralai/Mixtral-8x7B-v0.1")
    assert import_hf(stated).shape.name == "Mixtral-8x7B-v0.1"
    assert import_hf(config_in(tmp_path / "b", _name_or_path="/data/$(x)")).shape.name == "mixtral-46.7b"
    cached = tmp_path / "models--mistralai--Mixtral-8x7B" / "snapshots" / "0a1b"
    assert import_hf(config_in(cached)).shape.name == "Mixtral-8x7B"
    assert import_hf(CONFIG).shape.name == CONFIG.stem


def test_the_name_of_a_model_may_be_given(run: Run, tmp_path: Path) -> None:
    path = config_in(tmp_path / "x")
    shown = run("import", "hf", str(path), "--name", "mine", "-o", "mine.yaml")
    assert shown.code == 0 and shown.out.startswith("mine: ")
    assert "name: mine" in (tmp_path / "mine.yaml").read_text()
    with pytest.raises(InputError, match="letters, digits"):
        import_hf(path, "a b\n")


def test_a_csv_that_pytorch_refuses_says_so(run: Run) -> None:
    sizes = ("--pp", "4", "--microbatches", "8", "--format", "csv")
    both = run("schedule", "dualpipe", *sizes)
    assert both.code == 0 and "refuses this CSV: dualpipe" in both.err and "refuses" not in both.out
    assert run("schedule", "dualpipev", *sizes).err == ""
    assert run("schedule", "dualpipe", *sizes[:4]).err == "", "a drawing is not given to PyTorch"


@pytest.mark.parametrize("what", ["scenario", "result"])
def test_a_schema_states_its_dialect_and_describes_every_key(run: Run, what: str) -> None:
    schema = json.loads(run("schema", what).out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert [key for key, value in schema["properties"].items() if not value.get("description")] == []


def test_ctrl_c_ends_the_process_without_freeing_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesim.cli import root

    def stopped(**_: object) -> None:
        raise KeyboardInterrupt

    codes: list[int] = []
    monkeypatch.setattr(root, "commands", lambda only: stopped)
    monkeypatch.setattr(root, "_start_quickly", lambda: None)
    monkeypatch.setattr("os._exit", codes.append)
    for arguments in (None, ["simulate"]):  # a console script, and a caller inside a process that goes on
        with pytest.raises(SystemExit) as end:
            root.main(arguments)
        assert end.value.code == root.INTERRUPTED
    assert codes == [root.INTERRUPTED]
