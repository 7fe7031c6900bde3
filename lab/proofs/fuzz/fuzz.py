"""Changed and hostile input for every reader, in a process of its own with limits; reports what is wrong.

    python lab/proofs/fuzz/fuzz.py --cases 200000 --seed 0
    python lab/proofs/fuzz/fuzz.py --seed 0 --only 4711        (one case again: what it is, and the traceback)

Case n of a seed is always the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_S = 10.0
"""CPU seconds of a case."""
MOST_BYTES = 1_500_000_000
SLOW_S = 1.0
"""Cases above it are counted: what the input alone decides should take less."""
SILENT_S = 120.0
"""Wall seconds after which a process that reports nothing is ended (C code does not hear the timer)."""


_WRONG = (
    "wrong is an exception that is none of the two kinds of refusal, a case of more than 10 s of CPU time, "
    "and one that makes the process hold more than 1.5 GB."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that is wrong."""

    number: int
    target: str
    what: str
    where: str


@dataclass(slots=True)
class Report:
    """What came of some cases."""

    cases: int = 0
    cpu_s: float = 0.0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Cases by target and outcome: legal, or refused."""
    slow: list[tuple[float, int, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Count another report's cases too."""
        self.cases += other.cases
        self.cpu_s += other.cpu_s
        self.outcomes += other.outcomes
        self.slow = sorted([*self.slow, *other.slow], reverse=True)[:20]
        self.findings += other.findings


class TooSlowError(BaseException):
    """A case used up its time."""


def case(seed: int, number: int) -> tuple[Any, Any, random.Random]:
    """(target, what it reads, the draws left) of a case."""
    from fuzz_mutator import Mutator
    from fuzz_targets import TARGETS, pool

    rng = random.Random(f"{seed}/{number}")
    target = rng.choices(TARGETS, [t.weight for t in TARGETS])[0]
    return target, target.make(Mutator(rng, pool())), rng


def run_case(seed: int, number: int, folder: Path, report: Report) -> None:
    """Make one case, read it, and count what came of it."""
    from fuzz_targets import is_refusal

    target, made, rng = case(seed, number)
    began = time.process_time()
    outcome = "legal"
    try:
        signal.setitimer(signal.ITIMER_PROF, MOST_S)
        try:
            target.read(made, folder, rng)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except (Exception, TooSlowError) as error:
        if is_refusal(error):
            outcome = "refused"
        else:
            outcome = "wrong"
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "moesim" in f.filename]
            last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/moesim/')[2]}:{last.lineno} {last.name}"
            report.findings.append(
                Finding(number, target.name, f"{type(error).__name__}: {error}"[:200], where)
            )
    used = time.process_time() - began
    report.cases += 1
    report.outcomes[target.name, outcome] += 1
    if used > SLOW_S:
        report.slow.append((round(used, 2), number, target.name))


def prepare_process() -> None:
    """Limits of this process, and nothing that a prediction would keep or read elsewhere."""
    os.environ.update(MOESIM_CACHE="off", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", COLUMNS="100")
    warnings.simplefilter("ignore")
    import fuzz_targets  # all imports before the limit

    fuzz_targets.pool()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + MOST_BYTES, held + MOST_BYTES))
    signal.signal(signal.SIGPROF, _too_slow)


def _too_slow(number: int, frame: object) -> None:
    raise TooSlowError(f"more than {MOST_S:g} s")


def run_here(seed: int, numbers: Sequence[int], folder: Path) -> Report:
    """Some cases in this process, which must be prepared."""
    report = Report()
    began = time.process_time()
    for number in numbers:
        run_case(seed, number, folder, report)
    report.cpu_s = time.process_time() - began
    return report


def _work(seed: int, first: int, last: int, batch: int, now: Any, pipe: Any) -> None:
    prepare_process()
    with tempfile.TemporaryDirectory(prefix="moesim-fuzz-") as name:
        for start in range(first, last, batch):
            report = Report()
            began = time.process_time()
            for number in range(start, min(start + batch, last)):
                now.value = number
                run_case(seed, number, Path(name), report)
            report.cpu_s = time.process_time() - began
            pipe.send(report)
    pipe.close()


def run(seed: int, first: int, last: int, batch: int = 500) -> Iterator[Report]:
    """Reports of the cases from `first` to `last` - 1, by batches, in a process; in another if it dies."""
    context = multiprocessing.get_context("spawn")
    while first < last:
        mine, theirs = context.Pipe(duplex=False)
        now = context.Value("q", first, lock=False)
        process = context.Process(target=_work, args=(seed, first, last, batch, now, theirs), daemon=True)
        process.start()
        theirs.close()
        seen, since = -1, time.monotonic()
        try:
            while True:
                if mine.poll(1.0):
                    report = mine.recv()
                    first += report.cases
                    yield report
                if now.value != seen:
                    seen, since = now.value, time.monotonic()
                elif time.monotonic() - since > SILENT_S:
                    process.kill()
                    break
        except EOFError:
            pass
        process.join()
        if first < last:  # the rest of the batch is run again without the case that ended the process
            number = int(now.value)
            target, _, _ = case(seed, number)
            for report in run(seed, first, number, batch):
                yield report
            yield Report(
                1, findings=[Finding(number, target.name, f"the process died (exit {process.exitcode})", "")]
            )
            first = number + 1


def table(report: Report) -> str:
    """Cases by reader as Markdown."""
    names = sorted({target for target, _ in report.outcomes})
    rows = [
        f"| {name} | "
        + " | ".join(f"{report.outcomes[name, o]:,}" for o in ("legal", "refused", "wrong"))
        + " |"
        for name in names
    ]
    total = [sum(report.outcomes[n, o] for n in names) for o in ("legal", "refused", "wrong")]
    rows.append("| all | " + " | ".join(f"{n:,}" for n in total) + " |")
    return "\n".join(["| reader | legal | refused | wrong |", "|---|---|---|---|", *rows])


def _again(seed: int, number: int) -> None:
    target, made, rng = case(seed, number)
    print(f"case {number} of seed {seed}: {target.name}\n{str(made)[:3000]}\n")
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="moesim-fuzz-") as name:
        try:
            target.read(made, Path(name), rng)
        except (Exception, TooSlowError):
            traceback.print_exc(limit=-12)
    print(f"{time.process_time() - began:.2f} s")


def main() -> int:
    """Run, print the table, and fail where something is wrong."""
    words = argparse.ArgumentParser(
        description=f"{__doc__}\n{_WRONG}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--cases", type=int, default=2000)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--first", type=int, default=0, help="number of the first case")
    words.add_argument("--only", type=int, help="run one case here and show what it does")
    words.add_argument("--table", type=Path, help="write the table here")
    args = words.parse_args()
    if args.only is not None:
        prepare_process()
        _again(args.seed, args.only)
        return 0
    whole, shown, began = Report(), Counter[str](), time.monotonic()
    for report in run(args.seed, args.first, args.first + args.cases):
        whole.add(report)
        for found in report.findings:
            shown[found.where] += 1
            if shown[found.where] <= 3:
                print(f"WRONG {found.number} {found.target}: {found.what} at {found.where}", flush=True)
        print(
            f"{whole.cases:,} cases, {whole.cpu_s:.0f} CPU s, {len(whole.findings)} wrong",
            file=sys.stderr,
            flush=True,
        )
    text = (
        f"{whole.cases:,} cases of seed {args.seed}: {len(whole.findings)} wrong, {whole.cpu_s:.0f} s of CPU "
        f"time ({1000 * whole.cpu_s / max(1, whole.cases):.1f} ms a case), "
        f"{time.monotonic() - began:.0f} s on the wall.\n\n"
        f"{table(whole)}\n\nSlowest: " + ", ".join(f"{s:g} s (case {n}, {t})" for s, n, t in whole.slow[:8])
    )
    print(text)
    for where, count in shown.most_common():
        print(f"{count:5d} x {where}")
    if args.table is not None:
        command = f"python lab/proofs/fuzz/fuzz.py --cases {args.cases} --seed {args.seed}"
        args.table.write_text(f"# Fuzzed input\n\n`{command}`: {_WRONG}\n\n{text}\n")
    return 1 if whole.findings else 0


if __name__ == "__main__":
    sys.exit(main())
