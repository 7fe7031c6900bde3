"""How often to save, how often it breaks: goodput, finish and cost of the whole DeepSeek-V3 run.

Covers: `run` plans by name, failures, checkpoints, spares, optimal interval, infeasible runs, buying.
Scenario: DeepSeek-V3's published schedule on 2,048 H800, with other operators' published failure rates.
"""

from __future__ import annotations

import moesim

HOME = "deepseek-v3-2048xh800"
RATES = {
    "RSC-2": "run.failures=meta-rsc2",
    "Llama 3": "run.failures=llama3-16k-h100",
    "RSC-1": "run.failures=meta-rsc1",
    "RSC-1, 1,024-GPU jobs": "run.failures=meta-rsc1-1024-gpu-jobs",
    "300 a node-day": "run.failures={interruptions: 300 /node-day}",
}
INTERVALS = ("1 min", "5 min", "30 min", "2 h", "8 h", "optimal")
SLOW = "run.checkpoint={interval: 30 min, storage: bloom-jean-zay}"


def main() -> None:
    """Print tables over failure rate, checkpoint interval and spares."""
    step_s = moesim.simulate(HOME).step.time_s

    def report(*overrides: str) -> moesim.RunReport:
        plan = ("run.tokens=14.8e12", "run.restart=megascale", "run.start=2026-12-01", *overrides)
        return moesim.run(HOME, *plan, step_time_s=step_s)

    print("checkpoints that training waits for, to storage of 57.5 GB/s")
    print("failures as            interval    goodput   closed form   days P10 - P90     cost")
    for name, rate in RATES.items():
        for interval in INTERVALS:
            try:
                run = report(rate, SLOW, f"run.checkpoint.interval={interval}")
            except moesim.InfeasibleError as error:
                print(f"{name:22} {str(error).split(';')[0]}")
                break
            assert run.checkpoint is not None and run.cost_usd is not None
            shown = f"{run.checkpoint.interval_s / 60:.0f} min" if interval == "optimal" else interval
            print(
                f"{name:22} {shown:>8}{'*' if interval == 'optimal' else ' '}{run.goodput.predicted:9.1%}"
                f"{run.goodput_expected:13.1%}   {run.days.p10:7.1f} - {run.days.p90:.1f}"
                f"   ${run.cost_usd.predicted / 1e6:.2f}M"
            )
    print("* the best interval\n")

    print("asynchronous checkpoints to 3FS every 5 minutes, failures as Llama 3, repair in 3 days")
    print("spare nodes   goodput   waiting (kGPU-h)   finish P50    rented    bought")
    for count in (0, 1, 2, 4, 8):
        more = (
            RATES["Llama 3"],
            "run.checkpoint={interval: 5 min, asynchronous: true, storage: deepseek-3fs}",
            f"run.spares={{count: {count}, repair: 3 days}}",
        )
        rented, bought = report(*more), report(*more, "run.price.buy=h800-bought")
        assert rented.finish and rented.cost_usd and bought.cost_usd
        waiting = rented.gpu_hours.waiting_for_spares / 1e3
        print(
            f"{count:11}   {rented.goodput.predicted:7.1%}   {waiting:16.0f}   {rented.finish.p50}"
            f"   ${rented.cost_usd.predicted / 1e6:.2f}M   ${bought.cost_usd.predicted / 1e6:.2f}M"
        )


if __name__ == "__main__":
    main()
