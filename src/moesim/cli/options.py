"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass


ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A preset name, or a YAML or JSON file.")
]


Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a scenario key, such as parallel.ep=32; repeatable."
    ),
]


Seed = Annotated[int | None, typer.Option(help="Seed of routing and jitter; short for --set seed=N.")]


EngineDraws = Annotated[
    int,
    typer.Option(
        "--engine-draws",
        metavar="N",
        help="Add bands from N engine runs with all uncertain inputs off together (20 to 10,000; 0: none).",
    ),
]


Resolution = Annotated[
    str | None,
    typer.Option(metavar="folded|full", help="Simulate one group of GPUs for all (folded), or every GPU."),
]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
