"""Runs the trainers' own readers on today's exports, as far as their environments and trees are there.

    python lab/proofs/trainers/prove.py FOLDER

FOLDER holds them under the names that lab/proofs/trainers/README.md lists. A reader without its parts is skipped, and what
is missing is printed; its committed verdicts stay. Ends with the number of readers that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PROOF = ROOT / "lab" / "docs" / "proof"


@dataclass(frozen=True)
class Reader:
    """One reader: the command that writes its verdicts, and the paths without which it cannot run."""

    title: str
    command: tuple[str, ...]
    needs: tuple[Path, ...]

    @property
    def missing(self) -> tuple[Path, ...]:
        """Paths that are not there."""
        return tuple(path for path in self.needs if not path.exists())


def readers(folder: Path, exports: Path) -> tuple[Reader, ...]:
    """All readers, with their parts in `folder` and the texts to read in `exports`."""
    trees = {version: folder / f"megatron-{version}" for version in ("0.20", "0.14")}
    judge = folder / "judge" / "bin" / "python"
    command = [sys.executable, str(HERE / "judge_plans.py"), "--python", str(judge)]
    command += [word for version, tree in trees.items() for word in ("--tree", f"{version}={tree}")]
    schema = folder / "kubeflow.org_pytorchjobs.yaml"
    bridge = (folder / "bridge", trees["0.20"])
    return (
        Reader("Megatron-LM", tuple(command), (judge, *trees.values())),
        _reader(folder, "titan022", "torchtitan_022", "torchtitan-0.2.2", exports),
        _reader(folder, "titan030", "torchtitan_030", "torchtitan-0.3.0", exports),
        _reader(folder, "titan022", "bridge", "bridge", exports, *bridge),
        _reader(folder, "deepspeed", "deepspeed", "deepspeed", exports),
        _reader(folder, "jobs", "jobs", "jobs", exports, schema),
    )


def _reader(folder: Path, environment: str, script: str, name: str, exports: Path, *more: Path) -> Reader:
    python = folder / environment / "bin" / "python"
    verdicts = PROOF / f"trainers-{name}.json"
    command = (python, HERE / f"read_{script}.py", exports, verdicts, *more)
    return Reader(name, tuple(map(str, command)), (python, *more))


def main(folder: Path) -> int:
    """Run every reader that is there; the number of those that failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as exports:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        every = readers(folder.resolve(), Path(exports))
        if not all(reader.missing for reader in every[1:]):
            ours = {**environment, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{HERE}"}
            subprocess.run([sys.executable, str(HERE / "exports.py"), exports], env=ours, check=True)
        for reader in every:
            if reader.missing:
                missing = ", ".join(map(str, reader.missing))
                print(f"{reader.title}: skipped; lab/proofs/trainers/README.md says what these are: {missing}", flush=True)
                continue
            print(f"{reader.title}: reading", flush=True)
            failed += subprocess.run(reader.command, env=environment, check=False).returncode != 0
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
