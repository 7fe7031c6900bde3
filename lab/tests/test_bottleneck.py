"""The rates of the compiled engine are max-min fair, proved on its own functions without SimPy."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

from shared_links import PlainLinks, in_plain_python, random_case, run_case

from moesim.simulator.engine.compiled import links

CASES = 12
"""`make proof` runs more of them, and runs them compiled as well."""


@pytest.mark.parametrize("few", [True, False], ids=["few links", "many links"])
def test_every_flow_has_its_cap_or_a_bottleneck_whenever_flows_start_or_end(few: bool) -> None:
    slowed = 0
    with in_plain_python():
        for seed in range(CASES):
            outcome = run_case(random_case(seed), few, PlainLinks)
            assert not outcome.wrong, f"case {seed}: {outcome.wrong[0]}"
            slowed += outcome.slowed
    assert slowed > 100  # else the links of these cases are too wide to prove anything


@pytest.mark.parametrize("few", [True, False], ids=["few links", "many links"])
@pytest.mark.parametrize("solver", ["first come", "only once", "even shares"])
def test_the_proof_notices_a_wrong_solver(few: bool, solver: str) -> None:
    # The inner context ends first: undone later, it would leave plain Python where compiled code belongs.
    with in_plain_python(), pytest.MonkeyPatch.context() as patched:
        name = "rates_of_few" if few else "rates_of_many"
        right = getattr(links, name)

        def even_shares(run: object, count: int) -> None:
            """Rates that fit the links but leave room on them."""
            right(run, count)
            run.rates[:count] *= 0.99  # type: ignore[attr-defined]

        def first_come(run: object, count: int) -> None:
            """The first flow keeps its cap, whatever the others have."""
            right(run, count)
            run.rates[0] = 1.0 / run.flow_alone[run.group[0]]  # type: ignore[attr-defined]

        if solver == "only once":  # flows that slowed each other are not solved again when one leaves
            patched.setattr(links, "_solve_freed", lambda run, freed: None)
        else:
            wrong = {"first come": first_come, "even shares": even_shares}[solver]
            patched.setattr(links, name, wrong)
        outcomes = [run_case(random_case(seed), few, PlainLinks) for seed in range(3)]
    assert any(outcome.wrong for outcome in outcomes)
