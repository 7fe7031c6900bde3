"""The command `eplb`: plans replicas and placement of experts from recorded counts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from moesim.cli.console import AsJson, print_json, print_table, print_text
from moesim.hwmodels.errors import InputError

if TYPE_CHECKING:
    from moesim.hwmodels.arrays import FloatArray
    from moesim.simulator.layout.eplb import ExpertPlacement
    from moesim.simulator.scenario.sections import Policy


def eplb(
    file: Annotated[
        Path, typer.Argument(metavar="COUNTS", help="Rows by layer and expert: .csv, .npy or .json.")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of one expert-parallel group.", min=1)],
    redundant: Annotated[int, typer.Option(help="Replicas beyond one per expert, in all.", min=0)] = 0,
    policy: Annotated[str, typer.Option(help="global, or hierarchical: groups stay on a node.")] = "global",
    groups: Annotated[int, typer.Option(help="Groups of experts, for hierarchical.", min=1)] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes of the ranks, for hierarchical.", min=1)] = 1,
    top_k: Annotated[int, typer.Option(help="Experts per token, to check the counts.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Plan replicas and placement of experts from recorded counts; show the imbalance before and after.

    Imbalance is the heaviest rank over the mean. Several recorded steps are planned on their mean.
    """
    from moesim.hwmodels.validation import nearest
    from moesim.simulator.layout.eplb import plan_placement
    from moesim.simulator.layout.popularity import read_counts, shares_of_counts

    known = ["global", "hierarchical"]
    if policy not in known:
        raise InputError(f"--policy {policy!r} is not one of {', '.join(known)}{nearest(policy, known)}")
    counts = read_counts(file)
    layers = 1 if counts.ndim == 1 else counts.shape[-2]
    shares = shares_of_counts(
        counts, layers=layers, experts=counts.shape[-1], top_k=top_k, place=str(file)
    ).mean(axis=0)
    plan = plan_placement(
        shares,
        ranks=ranks,
        redundant_experts=redundant,
        policy=cast("Policy", policy),
        groups=groups,
        nodes=nodes,
    )
    rows = plan_rows(shares, plan)
    if as_json:
        print_json({"policy": policy, "ranks": ranks, "redundant_experts": redundant, "layers": rows})
        return
    before, after = (sum(row[key] for row in rows) / len(rows) for key in ("before", "after"))
    print_text(
        f"{len(rows)} layers, {shares.shape[1]} experts, {ranks} ranks of {plan.slots_per_rank} slots: "
        f"heaviest rank over mean {before:.3f} before, {after:.3f} after (mean over layers)"
    )
    headers = ("layer", "before", "after", "experts with replicas (x how many)")
    cells = [
        (
            str(row["layer"]),
            f"{row['before']:.3f}",
            f"{row['after']:.3f}",
            " ".join(f"{e}x{n}" for e, n in enumerate(row["replicas"]) if n > 1) or "-",
        )
        for row in rows
    ]
    print_table(headers, cells, right=(0, 1, 2))


LayerKey = Literal["layer", "before", "after", "replicas", "experts_of_rank"]


def plan_rows(shares: FloatArray, plan: ExpertPlacement) -> list[dict[LayerKey, Any]]:
    """For each layer: imbalance before and after, replicas of each expert, and experts of each rank."""
    from moesim.simulator.layout.eplb import imbalance, placement_in_order

    layers, experts = shares.shape
    before = imbalance(placement_in_order(layers, experts, plan.ranks).rank_load(shares)).tolist()
    after = imbalance(plan.rank_load(shares)).tolist()
    held = plan.expert_of_slot.reshape(layers, plan.ranks, -1).tolist()
    replicas = plan.replicas.tolist()
    return [
        {
            "layer": n,
            "before": before[n],
            "after": after[n],
            "replicas": replicas[n],
            "experts_of_rank": held[n],
        }
        for n in range(layers)
    ]
