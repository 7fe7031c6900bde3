"""The group `import`: a command for every registered importer of measurements, and those of other modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from moesim.cli.calibrate import Output, keep_profile
from moesim.cli.console import Force, note, print_table, print_text

if TYPE_CHECKING:
    from moesim.hwmodels.calibration import CalibrationProfile
    from moesim.kernels.importers import CalibrationImporter

Into = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="Merge into this profile (name or file) instead of a bare one."),
]


class ImportGroup(TyperGroup):
    """The commands that modules added, and one for every importer in `CALIBRATION_IMPORTERS`.

    The registry is read when a command of the group is looked up, so that `moesim --help` stays fast.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, importers of measurements first."""
        return [*_importers(), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of an importer, or of another module."""
        spec = _importers().get(cmd_name)
        return super().get_command(ctx, cmd_name) if spec is None else _command(spec)


def _importers() -> Mapping[str, CalibrationImporter]:
    from moesim.kernels.importers import CALIBRATION_IMPORTERS

    return CALIBRATION_IMPORTERS


def _command(spec: CalibrationImporter) -> Any:
    """The console command of an importer, with its logs, its output and its options."""

    def read(**given: Any) -> None:
        logs, output, into, force = (given.pop(key) for key in ("logs", "output", "into", "force"))
        facts = {option.parameter: option.value(given[option.parameter]) for option in spec.options}
        _keep(spec.read(logs, **facts), into, output, force)

    read.__doc__ = spec.help
    read.__signature__ = inspect.Signature(_parameters(spec))  # type: ignore[attr-defined]
    read.__annotations__ = {p.name: p.annotation for p in _parameters(spec)}
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(spec.name)(read)
    return typer.main.get_command(app)


def _parameters(spec: CalibrationImporter) -> Sequence[inspect.Parameter]:
    """Parameters of the console command, as Typer reads them from a function."""
    log = typer.Argument(metavar="LOG..." if spec.several else "LOG", help=spec.log)
    kinds: dict[str, tuple[Any, Any]] = {
        "logs": (Annotated[list[Path] if spec.several else Path, log], inspect.Parameter.empty),
        "output": (Output, inspect.Parameter.empty),
    }
    for option in spec.options:
        annotation = option.type if option.required or option.default is not None else option.type | None
        default = inspect.Parameter.empty if option.required else option.default
        kinds[option.parameter] = (
            Annotated[annotation, typer.Option(option.option, help=option.help)],
            default,
        )
    kinds |= {"into": (Into, None), "force": (Force, False)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in kinds.items()
    ]


def _keep(found: CalibrationProfile, into: str | None, output: Path, force: bool) -> None:
    """Write an imported profile, alone or merged into another, and print its entries."""
    from moesim.hwmodels.calibration import load_profile
    from moesim.kernels.importers import merge
    from moesim.simulator.cost.library_collectives import use_of

    imported = {entry.id for entry in found.entries()}
    profile = found if into is None else merge(load_profile(into), found, name=output.stem)
    keep_profile(profile, output, force)
    rows = [
        (e.id, e.kind, f"{e.residual.relative:.1%}", e.source) for e in profile.entries() if e.id in imported
    ]
    print_table(("entry", "kind", "residual", "source"), rows, right=(2,))
    for entry in profile.entries():
        if entry.id not in imported or not entry.id.startswith("nccl."):
            continue
        use = use_of(entry)
        if use is None:
            note(f"no price reads {entry.id}: the profile keeps it, and it changes no prediction")
        else:
            print_text(f"{entry.id} is read by {use}")
