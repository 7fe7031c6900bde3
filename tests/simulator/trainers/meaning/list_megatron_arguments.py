"""Lists the arguments that Megatron-LM's parser knows, for megatron-argument-names.txt.

    python list_megatron_arguments.py COMMIT=FOLDER COMMIT=FOLDER > megatron-argument-names.txt

Each FOLDER is an unpacked tree of NVIDIA/Megatron-LM; Python must have PyTorch. Every name is followed by the
numbers of the trees that have it.
"""

from __future__ import annotations

import subprocess
import sys

CODE = """
import argparse, sys, typing
if not hasattr(typing, "override"):
    typing.override = lambda function: function
sys.argv = ["pretrain_gpt.py"]
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser())
names = {name for action in parser._actions for name in action.option_strings}
print("NAMES " + " ".join(sorted(name for name in names if name.startswith("--") and name != "--help")))
"""


def names_of(folder: str) -> set[str]:
    """Option strings of the parser in an unpacked tree."""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        cwd=folder,
        env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(next(line for line in out.splitlines() if line.startswith("NAMES ")).split()[1:])


def main() -> None:
    """Print a header with the commits, and every name with the trees that have it."""
    trees = [text.partition("=") for text in sys.argv[1:]]
    found = [names_of(folder) for _, _, folder in trees]
    print("# Arguments of NVIDIA/Megatron-LM, by list_megatron_arguments.py from these commits:")
    for number, ((commit, _, _), names) in enumerate(zip(trees, found, strict=True), start=1):
        print(f"# {number}: {commit} ({len(names)} names)")
    for name in sorted(set().union(*found)):
        print(name, *(number for number, names in enumerate(found, start=1) if name in names))


if __name__ == "__main__":
    main()
