"""What a published row says: read strictly, completed by its configuration, or refused with a reason."""

from __future__ import annotations

from collections import Counter

import pytest

from moesim.hwmodels import InputError, list_accelerators
from moesim.simulator.scoring.scoreboard import OpenRow, open_rows
from moesim.simulator.scoring.scoreboard.configurations import (
    LEFT_OUT,
    Published,
    as_configured,
    behind_rows,
    differs_from,
    left_out_of,
    published_of,
    read_settings,
    settings,
    settings_of,
)
from moesim.simulator.scoring.scoreboard.plan import (
    HBM2E,
    expert_tp_of,
    hardware_of,
    left_out,
    machine_of,
    plan_of,
    policies_of,
    recompute_of,
    scenario_of,
    schedule_of,
    sharding_of,
)
from moesim.simulator.scoring.scoreboard.score import (
    Board,
    ScoredRow,
    by_group,
    prepared_row,
    reason_of,
    refusals,
    score_all,
    score_row,
    summary,
    totals,
)

ROWS = {row.id: row for row in open_rows()}


def changed(id_: str, **values: object) -> OpenRow:
    return ROWS[id_].model_copy(update=values)


def refusal(row: OpenRow) -> str:
    with pytest.raises(InputError) as caught:
        scenario_of(row, "none")
    return str(caught.value)


# -- published configurations -----------------------------------------------------------------------------


def test_every_configuration_stands_behind_a_row_and_contradicts_no_other() -> None:
    names = {setting.configuration for setting in settings()}
    assert names == {behind.configuration for behind in behind_rows()}
    assert all(any(behind.holds(row) for row in ROWS.values()) for behind in behind_rows())
    for row in ROWS.values():
        published_of(row)  # raises where two configurations disagree
    assert all(settings_of(row) for row in ROWS.values() if row.complete == "yes")


def test_every_setting_says_where_it_is_published_or_that_it_is_assumed() -> None:
    for setting in settings():
        if setting.repository:
            assert setting.revision and setting.file and setting.line.isdigit() and setting.key, setting
        else:
            assert setting.note and setting.field, setting
        assert setting.field or setting.note, setting
        assert (setting.here == LEFT_OUT) <= (setting.field == ""), setting


def test_contradicting_configurations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    row = changed("dgxc-047", id="twice")
    found = settings_of(row)
    other = found[0].model_copy(update={"here": "full"})
    monkeypatch.setattr(
        "moesim.simulator.scoring.scoreboard.configurations.settings_of", lambda _: (*found, other)
    )
    with pytest.raises(InputError, match=r"two values of recompute: none .* and full"):
        published_of(row)


@pytest.mark.parametrize(
    ("id_", "field", "value"),
    [
        ("dgxc-047", "loss", "compiled"),  # cross_entropy_loss_fusion true
        ("dgxc-047", "gradient_reduce", "bf16"),  # grad_sync_dtype bf16
        ("dgxc-047", "parameter_gather", "fp8"),
        ("dgxc-001", "loss", "compiled"),
        ("dgxc-006", "gradient_reduce", "bf16"),  # grad_reduce_in_fp32 False
        ("dgxc-011", "gradients", "bf16"),
        ("dgxc-123", "tied_embeddings", False),
        ("dgxc-137", "loss", "fused"),
        ("mbridge-081", "profile", "gb200-cudnn-2025"),  # NeMo 25.11: cuDNN 9.13
        ("dgxc-137", "cuda_graphs", ("attention", "router", "experts")),
        ("automodel-006", "recompute", "none"),  # activation_checkpointing false
        ("automodel-006", "zero_stage", 3),  # reshard_after_forward true
        ("automodel-005", "zero_stage", 2),
        ("automodel-005", "ep", 8),
        ("mlperf-009", "cuda_graphs", ("attention", "experts")),
        ("mlperf-011", "cuda_graphs", ()),
        ("mbridge-050", "recompute", ("layernorm", "moe_act")),
        ("dgxc-175", "recompute", ("mla_up_proj",)),
        ("mbridge-127", "recompute", ("mla_up_proj", "mlp")),
        ("mbridge-127", "overlap_data_parallel", False),
        ("mbridge-008", "profile", None),  # NeMo 26.08
        ("mbridge-101", "fp8_scales", "current"),
        ("mbridge-112", "fp8_scales", "mx"),  # MXFP8
        ("dgxc-129", "fp8_scales", "delayed"),
        ("dgxc-129", "fp8_activations", "separate"),
        ("mlperf-011", "fp8_activations", "fused"),  # Transformer Engine's own layer
        ("mbridge-013", "mtp", 2),
        ("automodel-001", "mtp", 0),
        ("mbridge-040", "recompute", "none"),  # offloaded
        ("mbridge-127", "mtp", 1),
        ("bloom-001", "weight_gradients", "added"),
        ("bloom-088", "weight_gradients", "added-fp32"),
        ("bloom-088", "launch_blocking", True),
        ("sc21-a100-011", "parameter_gathers", "matrix-ahead"),  # matrices below a billion parameters
        ("sc21-a100-014", "parameter_gathers", "matrix"),
        ("sc21-a100-010", "parameter_gathers", "block"),
    ],
)  # fmt: skip
def test_configurations_are_taken_whole(id_: str, field: str, value: object) -> None:
    stated = published_of(ROWS[id_])
    assert getattr(stated if field in type(stated).model_fields else stated.software, field) == value


def test_settings_reach_the_scenario() -> None:
    llama = scenario_of(ROWS["dgxc-047"], "none")
    assert (llama.software.loss, llama.recipe.loss, llama.recipe.gradient_reduce) == (
        "compiled",
        "fp32",
        "bf16",
    )
    assert (llama.recipe.gradients, llama.recipe.parameter_gather) == ("bf16", "fp8")
    assert not scenario_of(ROWS["dgxc-123"], "none").shape.tied_embeddings
    layers = scenario_of(ROWS["dgxc-180"], "selective").stages.layers
    assert layers == (*(4,) * 15, 1)
    assert scenario_of(ROWS["dgxc-180"], "selective").shape.mtp_layers == 1
    assert scenario_of(ROWS["dgxc-175"], "selective").stages.layers == (7, *(8,) * 6, 6)


def test_what_is_stated_and_not_expressed_is_said_with_the_row() -> None:
    assert any("dropout" in note for note in left_out(ROWS["dgxc-053"]))
    assert any("host memory" in note for note in left_out(ROWS["mbridge-040"]))
    assert not any("recompute" in note for note in left_out(ROWS["dgxc-180"]))
    assert scenario_of(ROWS["dgxc-180"], *policies_of(ROWS["dgxc-180"])).recompute == (
        "mla_up_proj", "mlp", "moe",
    )  # fmt: skip
    plan = scenario_of(ROWS["dgxc-066"], "none").parallel
    assert (plan.shard_group, plan.shard_optimizer_over_groups) == (128, False)
    assert left_out(ROWS["dgxc-001"]) == ()
    # A table that contradicts itself gives way to its release's configuration, others do not.
    assert (ROWS["mbridge-100"].mbs, plan_of(ROWS["mbridge-100"]).microbatch) == (4, 1)
    assert any("contradicts its accumulation" in note for note in left_out(ROWS["mbridge-100"]))
    assert plan_of(ROWS["mbridge-077"]).microbatch == ROWS["mbridge-077"].mbs == 2
    stated = [s for row in ROWS.values() for s in settings_of(row) if s.here == LEFT_OUT]
    assert {s.note for s in stated} == {note for row in ROWS.values() for note in left_out_of(row)}


def test_layers_of_stages_are_read_in_short() -> None:
    assert Published.model_validate({"stages": "1 2*3 0"}).stages == (1, 2, 2, 2, 0)
    assert read_settings({"cuda_graphs": "none"}, "a row").software.cuda_graphs == ()


# -- refusals ---------------------------------------------------------------------------------------------


def test_a_degree_that_the_configuration_states_is_not_missing() -> None:
    assert [ROWS[id_].ep for id_ in ("automodel-005", "automodel-006")] == [0, 0]
    assert [scenario_of(ROWS[id_], "none").parallel.ep for id_ in ("automodel-005", "automodel-006")] == [
        8,
        64,
    ]


def test_every_open_row_is_expressed_or_refused_for_a_reason_that_counts() -> None:
    refused: Counter[tuple[str, str]] = Counter()
    for row in ROWS.values():
        try:
            scenario_of(row, policies_of(row)[-1])
        except InputError as error:
            assert str(error).startswith(f"{row.id}: "), error
            refused[row.family, row.arch] += 1
    assert sum(refused.values()) == 543 - 424
    assert refused["Hopper", "moe"] == 59  # of 90


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"mbs": 0}, "the micro-batch is not stated"),
        ({"gbs_seqs": 0}, "the global batch is not stated"),
        ({"precision": ""}, "the precision is not stated"),
        ({"metric": "mfu"}, "an MFU without its count of FLOPs was published"),
        ({"precision": "fp6"}, "precision 'fp6' is not known"),
        ({"zero_or_fsdp": "zero++"}, "the sharding 'zero++' is not known"),
        ({"recompute": "half"}, "the recompute policy 'half' is not known"),
        ({"schedule": "v-half"}, "the schedule 'v-half' is not known"),
        ({"hardware": "H20"}, "no machine for H20"),
        ({"notes": "limited to 350 W"}, "no description of H100-SXM at 350 W"),
        ({"model": "unheard-of-7b"}, "the shape of unheard-of-7b is not known"),
        (
            {"heads": 64},
            "heads of llama3-8b is 64 in the table and 32 in its configuration (meta-llama/",
        ),
        ({"model": "gpt3-5b", "ffn": 0}, "ffn of gpt3-5b is missing"),
        ({"model": "gpt3-5b", "hidden": 4100}, "hidden=4100 is no multiple of heads=32"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_with_its_reason(
    values: dict[str, object], reason: str
) -> None:
    row = changed("dgxc-001", **values)
    scored = score_row(row, None)
    assert reason_of(scored).startswith(reason) and scored.predicted_step_s is None


def test_refusals_are_counted_by_reason_family_and_kind() -> None:
    rows = [
        changed("dgxc-001", id="a", mbs=0),
        changed("dgxc-001", id="b", mbs=0),
        changed("mbridge-039", id="c", precision="fp6"),
    ]
    board = score_all(rows, draw=None)
    assert [(r.reason, r.family, r.arch, r.rows) for r in board.refusals] == [
        ("the micro-batch is not stated", "Hopper", "dense", 2),
        ("precision 'fp6' is not known", "Blackwell", "dense", 1),
    ]
    assert board.groups == () and board.group_mean is None


# -- wording ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("", 0), ("none", 0), ("zero1/distopt", 1), ("distopt*", 1), ("distopt(zero1)", 1),
        ("fsdp-grad-op(zero2)", 2), ("fsdp (no reshard after forward)", 2),
        ("fsdp2 reshard_after_forward=false", 2),
        ("fsdp", 3), ("fsdp2 shard=8", 3), ("fsdp-full(zero3)", 3), ("zero3", 3),
    ],
)  # fmt: skip
def test_words_of_sharding(text: str, stage: int) -> None:
    assert sharding_of(changed("dgxc-001", zero_or_fsdp=text)).zero_stage == stage


def test_parameters_kept_after_forward_reach_the_plan() -> None:
    row = changed("dgxc-001", zero_or_fsdp="fsdp (no reshard after forward)", source="a table alone")
    assert scenario_of(row, "none").parallel.zero_stage == 2


@pytest.mark.parametrize(
    ("text", "policy", "rest"),
    [
        ("", None, ""), ("none", "none", ""), ("full", "full", ""), ("selective", "selective", ""),
        ("selective (RMSNorm, MLA up-proj)", "selective", ""),
        ("selective (mla_up_proj, moe)", ("mla_up_proj", "moe"), ""),
        ("op", "op", ""), ("selective (op)", "op", ""),
    ],
)  # fmt: skip
def test_words_of_recompute(text: str, policy: str | tuple[str, ...] | None, rest: str) -> None:
    found, notes = recompute_of(changed("dgxc-001", recompute=text))
    assert found == policy
    assert (f"recompute of {rest} " in "".join(notes)) == bool(rest)


def test_words_of_split_experts() -> None:
    assert expert_tp_of(changed("dgxc-001", notes="method=TP+EP+DP; ETP==TP; ...", tp=4)) == 4
    assert expert_tp_of(changed("dgxc-001", notes="method=MCore w/ Folding; ETP=1", tp=4)) == 1
    assert expert_tp_of(changed("dgxc-001", notes="", tp=2)) == 1


def test_words_of_schedules() -> None:
    assert schedule_of(changed("dgxc-001", schedule="", vpp=1)) == "1f1b"
    assert schedule_of(changed("dgxc-001", schedule="1f1b", vpp=4)) == "interleaved-1f1b"
    assert schedule_of(changed("dgxc-001", schedule="zbv")) == "zbv"


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ("compute is overlapped with a2a", True), ("DeepEP, EP overlap", True), ("A2A_OVERLAP=1", True),
        ("no a2a overlap", False), ("no TP comm overlap", False), ("DeepEP", False),
    ],
)  # fmt: skip
def test_all_to_all_behind_compute_is_not_passed_over(notes: str, said: bool) -> None:
    row = changed("automodel-004", notes=notes)
    paired = scenario_of(row, "none").schedule == "interleaved-1f1b-overlapped"
    assert paired == said and not any("all-to-all runs" in note for note in left_out(row))
    deep = changed("automodel-004", notes=notes, pp=2)  # Megatron core pairs interleaved stages only
    assert any("all-to-all runs behind the compute" in note for note in left_out(deep)) == said


# -- machines ---------------------------------------------------------------------------------------------


def test_a_known_name_of_another_kind_is_refused() -> None:
    assert "is not known" in refusal(changed("dgxc-001", model="mixtral-8x7b"))


def test_power_and_memory_variants_have_descriptions_of_their_own() -> None:
    row = changed("dgxc-001", notes="96GB HBM2e H100, limited to 500 W")
    assert hardware_of(row) == HBM2E and "h100-hbm2e-96gb" in list_accelerators()
    cluster, profile = machine_of(row)
    assert cluster.accelerator.hbm_bytes == 96 * 2.0**30 and cluster.accelerator.hbm_bytes_per_s == 2.4e12
    assert profile == "h100-hbm2e-products"
    assert any("500 W" in note for note in left_out(row))
    assert hardware_of(changed("dgxc-001", notes="500 W")) == HBM2E
    assert hardware_of(changed("dgxc-001", notes="700 W")) == "H100-SXM"


def test_nodes_of_jean_zay_have_what_their_own_test_measured() -> None:
    bloom, selene = (machine_of(ROWS[id_])[0].node for id_ in ("bloom-088", "sc21-a100-010"))
    # Two GPUs share an adapter, which moves 40.8 Gb/s; prices take 0.8 of the figure.
    assert 0.8 * 2 * bloom.scale_out_bytes_per_s == pytest.approx(40.8e9 / 8, rel=0.01)
    assert selene.scale_out_bytes_per_s == 25e9


# -- statistics -------------------------------------------------------------------------------------------


def scored(group: str, error: float | None, **more: object) -> ScoredRow:
    known: dict[str, object] = {
        "id": "a", "group": group, "arch": "dense", "family": "Hopper", "source": "s",
        "published_step_s": 1.0, "relative_error": error,
        "predicted_step_s": None if error is None else 1.0 + error,
        "refused": "" if error is not None else "a: why",
    }  # fmt: skip
    return ScoredRow.model_validate(known | more)


def test_rows_and_groups_are_two_statistics() -> None:
    rows = [scored("large", 0.01) for _ in range(9)] + [
        scored("small", -0.3),
        scored("third", 0.2),
        scored("x", None),
    ]
    total = summary("all", rows)
    assert total is not None
    assert (total.rows, total.refused, total.groups) == (11, 1, 3)
    assert total.median_absolute_error == pytest.approx(0.01)
    assert total.group_mean == pytest.approx((0.01 + 0.3 + 0.2) / 3)
    assert total.group_median == pytest.approx(0.2)
    assert refusals(rows)[0].reason == "why"


def test_a_summary_leaves_out_what_was_refused() -> None:
    total = summary("x", [scored("g", -0.2), scored("g", 0.1), scored("g", 0.4), scored("g", None)])
    assert total is not None
    assert (total.rows, total.median_error, total.worst_absolute_error) == (3, 0.1, 0.4)
    assert total.covered is None and summary("x", [scored("g", None)]) is None


def test_a_row_that_ran_and_does_not_fit_is_counted() -> None:
    rows = [scored("g", 0.0, fits=False), scored("g", 0.0, fits=True), scored("g", None)]
    total = summary("all", rows)
    assert total is not None and total.too_large == 1
    ran = score_row(changed("kort-a100-001", id="ran"), None)
    assert ran.fits and ran.capacity_bytes == 80 * 2.0**30 and ran.needed_bytes is not None
    assert 0.0 < ran.needed_bytes < ran.capacity_bytes


def test_the_table_prints_both_statistics_refusals_and_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moesim.cli.scores import print_board

    monkeypatch.setenv("COLUMNS", "200")  # narrower tables fold their headers

    large = {
        "needed_bytes": 90 * 2.0**30,
        "capacity_bytes": 80 * 2.0**30,
        "fits": False,
        "left_out": ("why not",),
    }
    known: dict[str, object] = {"lower_bound_s": 0.9, "upper_bound_s": 1.2}
    rows = (scored("g", 0.1, **known, **large), scored("h", -0.3, **known), scored("h", None))
    board = Board(
        rows=rows,
        groups=tuple(by_group(rows)),
        totals=tuple(totals(rows)),
        refusals=refusals(rows),
        group_mean=0.2,
    )
    print_board(board)
    text = " ".join(capsys.readouterr().out.split())
    assert "mean of group medians" in text and "scored 2 of 3 rows" in text
    assert "1 Hopper dense why" in text and "1 of 1 do not fit" in text
    assert "90.0 80 no" in text and "1 why not" in text


def test_a_tables_plan_that_does_not_fit_gives_way_to_the_configurations() -> None:
    """Micro-batch 2 on 24 virtual stages does not fit; the release's 1 on 12 does, and the row says so."""
    row = ROWS["mbridge-101"]
    assert [d.split(":")[1] for d in differs_from(row)] == [" priced with the table's"] * 2
    configured = as_configured(row)
    assert configured is not None and (configured.mbs, configured.vpp) == (1, 12)
    assert as_configured(configured) is None
    assert prepared_row(row).scenario.parallel == plan_of(configured)
    assert prepared_row(ROWS["mbridge-078"]).scenario.parallel == plan_of(ROWS["mbridge-078"])  # it fits
