"""Writes docs/api.md: the public names of `moesim` by purpose, and the directives that the site expands.

    python -m lab.writers.api_page

The list above the directives is for readers on a code host, where no directive is expanded.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import moesim

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Scenarios", ("load", "presets", "Scenario", "check", "Check")),
    ("One step", ("simulate", "Result", "Inputs", "estimate", "Estimate", "reprice")),
    ("Why", ("explain", "Explanation", "timeline", "Timeline", "compare_trace", "export_trace", "trace")),
    (
        "Comparing and varying",
        ("compare", "Comparison", "sweep", "Sweep", "Progress", "neighbours"),
    ),
    ("How sure", ("interval", "sensitivity", "Sensitivity", "Uncertainty")),
    (
        "Planning",
        ("plan", "PlanSpace", "PlanResult", "compare_hardware", "HardwareComparison", "size", "Sizing"),
    ),
    ("Training frameworks", ("trainer", "Trainer", "import_launch", "Understanding")),
    ("The whole run", ("run", "RunReport")),
    ("Serving", ("serve", "ServingResult", "serve_plan", "ServingPlan", "serve_sweep", "ServingSweep")),
    ("Published figures", ("published", "score")),
    ("Errors", ("MoesimError", "InputError", "InfeasibleError")),
)
"""Public names by purpose; a test holds that they are `moesim.__all__`, apart from `__version__`."""

PARTS = ("StepResult", "Breakdown", "MemoryResult", "RunResult", "Utilisation", "MovedBytes")
"""Fields of a `Result` that are described below it, in `moesim.simulator.predict.result_parts`."""

HEAD = """# The Python interface

Everything public is a name of `moesim`; other modules may change without notice. `import moesim` is fast: a
name is loaded when it is first used. A scenario is given as a `Scenario`, a preset's name, a path, its keys
as a mapping, or a result; overrides `"key=value"` follow it, and are applied or refused.
Quantities are in SI units, and names end in the unit (`_s`, `_bytes`, `_usd`). Malformed input raises
`InputError`, a plan that cannot be `InfeasibleError`. [Commands by example](commands.md#from-python) has a
first script.
"""


def sentence(name: str) -> str:
    """The first sentence of a public name's docstring."""
    text = " ".join((inspect.getdoc(getattr(moesim, name)) or "").split("\n\n")[0].split())
    match = re.match(r"(.+?[.:;])(?: |$)", text)
    return (match[1] if match else text).rstrip(".:;") + "."


def names() -> list[str]:
    """The public names on the page, in its order."""
    return [name for _, group in SECTIONS for name in group]


def page() -> str:
    """The text of docs/api.md."""
    parts = [HEAD]
    for title, group in SECTIONS:
        parts.append(f"**{title}**\n\n" + "".join(f"- `{name}`: {sentence(name)}\n" for name in group))
    parts.append(
        "The site that `make docs` builds shows signatures, arguments and fields of each below. Here the "
        "docstrings\nare in the source: [src/moesim/\\_\\_init\\_\\_.py](../src/moesim/__init__.py).\n"
    )
    for title, group in SECTIONS:
        parts.append(f"## {title}\n\n" + "\n".join(f"::: moesim.{name}\n" for name in group))
    described = "\n".join(f"::: moesim.simulator.predict.result_parts.{name}\n" for name in PARTS)
    parts.append(
        "## Parts of a result\n\nThe fields `step`, `breakdown_s`, `memory`, `run`, `utilisation` and "
        f"`moved_bytes` of a `Result` are these.\n\n{described}"
    )
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
