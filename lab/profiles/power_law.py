"""Shortens a run of the power study, and writes the profiles *-power.yaml from the short file.

    python -m lab.profiles.power_law shorten RAW.json | xz -9e > lab/results/2026-11-22-h200-power.json.xz
    python -m lab.profiles.power_law law SHORT.json [blackwell|a100] > hwmodels/data/calibration/...
    python -m lab.profiles.power_law check SHORT.json

The law stands on segments of one class alone, on duties of periods of up to 10 ms and on one mix (GEMMs and
memory); `check` predicts the other mixes, which had no part in it.
"""

from __future__ import annotations

import json
import sys
from math import exp, fsum, log
from statistics import fmean, median
from typing import Any

from lab import packed

from moesim.hwmodels.calibration_entry import PowerLaw, load_clock

MOST_MHZ = 1980.0
MEASURED = {
    "h200": (
        "benchmarks/gpu/results/2026-11-22-h200-power.json: kernels/calibrate/studies/power.py on one NVIDIA "
        "H200 (700 W), driver 580.159.04, torch 2.11.0; written by benchmarks/power_law.py",
        "2026-11-22",
        "not pinned, 1230 to 1980 MHz",
    ),
    "h100": (
        "lab/results/2026-11-26-h100-power.json.xz: lab/studies/power.py on one NVIDIA H100 80GB HBM3 (700 W), "
        "driver 580.159.04, torch 2.11.0; written by lab/profiles/power_law.py",
        "2026-11-26",
        "not pinned, 1328 to 1980 MHz",
    ),
}
"""Source, date and clocks of the accelerators whose law was measured."""
FULL = ("gemm large", "gemm of the duties", "gemm short", "gemm fp8", "gemm spread 0.02")
"""Segments of GEMMs back to back: their mean clock is the reference."""
GEMM_DUTIES = (
    "gemm of the duties", "duty 0.9 of 10.0 ms", "duty 0.75 of 10.0 ms", "duty 0.5 of 10.0 ms",
    "duty 0.9 of 1.0 ms", "duty 0.75 of 1.0 ms", "duty 0.5 of 1.0 ms", "duty 0.25 of 10.0 ms",
)  # fmt: skip
CHECKED = ("soak", "mix with a fifth idle", "gemm and attention", "gemm and rows")
Segment = dict[str, Any]
COLLECTIVES = "2026-11-22-h200-x2-power-collectives.json"
"""Power beside NCCL's collectives of 64 MiB and 1 GiB on two H200 (studies/power_collectives.py)."""


def shortened(raw: dict[str, Any]) -> dict[str, Any]:
    """Machine, loads, every segment with its mean power, clock and temperatures, and two samples a second."""
    columns = raw["sample_columns"]
    at = {name: i for i, name in enumerate(columns)}
    out: dict[str, Any] = {key: raw[key] for key in ("machine", "loads", "failed", "seconds")}
    out["segments"], out["other"] = {}, {}
    for name, part in raw["parts"].items():
        result = part["result"]
        if isinstance(result, dict) and "stretches" in result:
            last = result["stretches"][-1]
            out["soak"] = [_means(s, raw["samples"], at) for s in result["stretches"]]
            out["segments"][name] = _means(last, raw["samples"], at)
        elif isinstance(result, dict):
            out["segments"][name] = _means(result, raw["samples"], at)
        elif name == "back to back":
            out["other"][name] = [{"name": row["name"]} | _means(row, raw["samples"], at) for row in result]
        elif name.startswith("transient"):
            out["other"][name] = [[round(t, 5), round(s, 8)] for t, s in result[::4]]
        else:
            out["other"][name] = [{**row, "seconds": [round(s, 8) for s in row["seconds"]]} for row in result]
    origin = raw["samples"][0][0]
    out["sample_columns"] = columns
    out["samples"] = [[round(row[0] - origin, 2), *row[1:]] for row in raw["samples"][::10]]
    return out


def _means(result: Segment, samples: list[list[float]], at: dict[str, int]) -> Segment:
    """A segment without its windows, with means of the samples behind its first 1.5 s."""
    end = result.get("to_s", 0.0)
    rows = [row for row in samples if result.get("from_s", end) + 1.5 <= row[0] <= end]
    kept = {key: result[key] for key in ("classes", "busy_share", "pieces_s_flop_bytes") if key in result}
    if result.get("clock_mhz"):
        kept["spin_clock_mhz"] = median(result["clock_mhz"])
    for name in ("power_w", "sm_mhz", "gpu_c", "memory_c"):
        if rows:
            kept[name] = round(fmean(row[at[name]] for row in rows), 2)
    kept["throttle_reasons"] = sorted({int(row[at["reasons"]]) for row in rows})
    return kept


# -- the law ---------------------------------------------------------------------------------------------


def slope(xs: list[float], ys: list[float]) -> float:
    """Least-squares exponent of y over x."""
    us, vs = [log(x) for x in xs], [log(y) for y in ys]
    u, v = fmean(us), fmean(vs)
    return fsum((a - u) * (b - v) for a, b in zip(us, vs, strict=True)) / fsum((a - u) ** 2 for a in us)


def rate(segment: Segment, cls: str) -> float:
    """FLOP/s of a class, or bytes/s of memory."""
    row = segment["classes"][cls]
    return float(row["bytes_per_s"] if cls == "memory" else row["flop_per_s"])


def busy_power(segment: Segment, wait_w: float) -> float:
    """Power of the kernels themselves, from the mean power and the share of the time that they run."""
    share = segment["busy_share"]
    return float((segment["power_w"] - (1.0 - share) * wait_w) / share)


def beside_gemms(mixed: Segment, cls: str, own: dict[str, float]) -> float:
    """Power (W) beyond waiting of a class that takes turns with GEMMs, whose power at this clock is known."""
    seconds = {name: row["seconds"] for name, row in mixed["classes"].items()}
    share = fsum(s for name, s in seconds.items() if name.startswith(cls)) / fsum(seconds.values())
    gemm = (own["limit"] - own["wait"]) * (mixed["sm_mhz"] / own["reference"]) ** own["gemm_power"] + own[
        "wait"
    ]
    return float((mixed["power_w"] - (1.0 - share) * gemm) / share - own["wait"])


def law_of(segments: dict[str, Segment], of: str = "h200") -> dict[str, float]:
    """The numbers of the law, in W, MHz and exponents."""
    limit = fmean(segments[name]["power_w"] for name in FULL)
    reference = fmean(segments[name]["sm_mhz"] for name in FULL)
    wait = segments["spinning"]["power_w"]
    duties = [segments[name] for name in GEMM_DUTIES]
    clocks = [segment["sm_mhz"] for segment in duties]
    dynamic = [busy_power(segment, wait) - wait for segment in duties]
    own = {"limit": limit, "reference": reference, "wait": wait}
    own["gemm_rate"] = slope(clocks, [rate(segment, "gemm_bf16") for segment in duties])
    own["gemm_power"] = slope(clocks, dynamic)
    alone, half = segments["attention"], segments["attention duty 0.5"]
    pair = [alone["sm_mhz"], half["sm_mhz"]]
    kinds = ("attention_forward", "attention_backward")
    own["attention_rate"] = fmean(slope(pair, [rate(alone, k), rate(half, k)]) for k in kinds)
    powers = [busy_power(segment, wait) - wait for segment in (alone, half)]
    own["attention_power"] = slope(pair, powers)
    own["attention_clock"] = alone["sm_mhz"]
    own["attention_w"] = powers[0] * (reference / alone["sm_mhz"]) ** own["attention_power"] + wait
    if of == "h100":  # beside GEMMs it draws more than its duties say
        mixed = segments["gemm and attention"]
        there = beside_gemms(mixed, "attention", own)
        pair, powers = [mixed["sm_mhz"], *pair], [there, *powers]
        own["attention_power"] = slope(pair, powers)
        middle = exp(
            fmean(log(p) for p in powers) - own["attention_power"] * fmean(log(x / reference) for x in pair)
        )
        own["attention_w"] = middle + wait
    mixed, memory = segments["gemm and memory"], segments["memory"]
    there = beside_gemms(mixed, "memory", own)
    own["memory_power"] = slope([mixed["sm_mhz"], memory["sm_mhz"]], [there, memory["power_w"] - wait])
    own["memory_w"] = there * (reference / mixed["sm_mhz"]) ** own["memory_power"] + wait
    own["memory_rate"] = slope(
        [mixed["sm_mhz"], memory["sm_mhz"]], [rate(mixed, "memory"), rate(memory, "memory")]
    )
    return own


def modelled(own: dict[str, float], segments: dict[str, Segment], of: str = "h200") -> PowerLaw:
    """The law of an accelerator as the simulator has it, relative to the limit and to the reference clock."""
    source, date, clocks = MEASURED[of]
    limit, reference = own["limit"], own["reference"]
    round_ = lambda value: round(value, 3)  # noqa: E731
    fp8 = log(rate(segments["fp8 duty 0.5 of 10 ms"], "gemm_fp8") / rate(segments["gemm fp8"], "gemm_fp8"))
    fp8 /= log(segments["fp8 duty 0.5 of 10 ms"]["sm_mhz"] / segments["gemm fp8"]["sm_mhz"])
    classes = {
        "gemm": {
            "power": 1.0,
            "power_exponent": round_(own["gemm_power"]),
            "rate_exponent": round_(fmean([own["gemm_rate"], fp8])),
        },
        "attention": {
            "power": round_(own["attention_w"] / limit),
            "power_exponent": round_(own["attention_power"]),
            "rate_exponent": round_(own["attention_rate"]),
            "alone_clock": round_(own["attention_clock"] / reference),
        },
        "memory": {
            "power": round_(own["memory_w"] / limit),
            "power_exponent": round_(own["memory_power"]),
            "rate_exponent": 0.0,
        },
    }
    return PowerLaw.model_validate(
        {
            "id": f"{of}-power.law",
            "source": source,
            "kind": "measured",
            "date": date,
            "residual": {
                "relative": 0.03,
                "meaning": "clocks of mixes that had no part in it are met within 1 %; other shapes",
            },
            "conditions": {"device": f"NVIDIA {of.upper()}", "clocks": clocks},
            "most_clock": round_(MOST_MHZ / reference),
            "wait": round_(own["wait"] / limit),
            "collective": round_(collective_share()),
            "classes": classes,
        }
    )


def collective_share() -> float:
    """Power while only collectives run, over that of GEMMs: mean of three operations and two sizes."""
    rows = packed.read(COLLECTIVES)["segments"]
    alone = [row["power_w"] for name, row in rows.items() if "GEMM" not in name]
    return fmean(alone) / float(rows["GEMM"]["power_w"])


ASSUMED = {
    "blackwell": (
        1.32,
        "highest clock from blackwell-sustained: bursts are 1 / 0.845 of sustained rates, to the power of "
        "1 / 0.608; exponents as on the H200; attention alone is not limited (its ratio is 0.99)",
    ),
    "a100": (
        1.25,
        "highest clock from thonking.ai: zeros at 295 where random operands run at 257 TFLOP/s, to the power "
        "of 1 / 0.608; exponents as on the H200; attention alone is not limited",
    ),
}
"""Highest clock over the reference of architectures that were not measured, and where it comes from."""


def assumed(law: PowerLaw, of: str) -> PowerLaw:
    """The law on an architecture that was not measured."""
    most, source = ASSUMED[of]
    residual = {"relative": 0.1, "meaning": "assumed: half of what the law does to a GEMM beside waits"}
    own = {"id": f"{of}-power.law", "source": f"assumption; {source}", "kind": "assumed", "most_clock": most}
    classes = {name: row.model_dump() for name, row in law.classes.items()}
    power = law.wait + (1.0 - law.wait) / most ** law.classes["attention"].power_exponent
    classes["attention"] |= {"power": round(power, 3), "alone_clock": most}
    changed = {**own, "residual": residual, "conditions": {}, "classes": classes}
    return PowerLaw.model_validate({**law.model_dump(), **changed})


def checks(
    law: PowerLaw, own: dict[str, float], segments: dict[str, Segment]
) -> dict[str, tuple[float, float]]:
    """(measured, predicted) clock in MHz of mixes, from their shares of time as measured."""
    out = {}
    for name in CHECKED:
        if name not in segments:
            continue
        segment = segments[name]
        seconds: dict[str, float] = {}
        for cls, row in segment["classes"].items():
            key = {"pieces": "memory"}.get(cls, cls.split("_")[0])
            seconds[key] = seconds.get(key, 0.0) + row["seconds"]
        total = fsum(seconds.values()) / segment["busy_share"]
        wait = 1.0 - segment["busy_share"]
        shares = {key: value / total for key, value in seconds.items()}
        clock = load_clock(law, lambda x, s=shares: s, wait=wait)
        out[name] = segment["sm_mhz"], clock * own["reference"]
    return out


def main() -> None:
    """Run one of the three commands of the module's description."""
    command, data = sys.argv[1], json.loads(packed.text(sys.argv[2]))
    if command == "shorten":
        print(json.dumps(shortened(data)))
        return
    of = "h100" if "H100" in data["machine"]["gpu"] else "h200"
    own = law_of(data["segments"], of)
    law = modelled(own, data["segments"], of)
    if command == "check":
        print({key: round(value, 3) for key, value in own.items()})
        for name, (measured, predicted) in checks(law, own, data["segments"]).items():
            print(f"{name}: {measured:.0f} MHz, predicted {predicted:.0f} ({predicted / measured - 1:+.1%})")
        return
    carried = sys.argv[3] if len(sys.argv) > 3 else ""
    print(profile_text(assumed(law, carried) if carried else law, carried or of), end="")


HEADS = {
    "h200": """\
# Written by lab/profiles/power_law.py from lab/results/2026-11-22-h200-power.json.xz.
name: h200-power
accelerator: any
software: "torch 2.11.0 (cuBLAS, cuDNN), CUDA 13.0, driver 580.159.04"
description: Power of kernel classes against the clock, and the clock of a mix (part of other profiles).
evidence: >-
  NVML beside kernels on one H200 at its limit of 700 W, after a soak of 160 s in which clock and rates
  stayed within 0.3 %. The numbers stand on GEMMs, attention and memory-bound kernels alone and with idle
  gaps, and on one mix. Mixes like a training step's had no part in them and are met within 1 % of the clock.
  `collective` is the mean of three operations in two sizes (0.40 to 0.56), NCCL on two H200. H100 and H800
  have the same die and the same limit. No training step was looked at.
""",
    "h100": """\
# Written by lab/profiles/power_law.py from lab/results/2026-11-26-h100-power.json.xz.
name: h100-power
accelerator: any
software: "torch 2.11.0 (cuBLAS, cuDNN), CUDA 13.0, driver 580.159.04"
description: Power of kernel classes against the clock, and the clock of a mix (part of other profiles).
evidence: >-
  NVML beside kernels on one H100 at its limit of 700 W, after a soak of 45 s. Kernels bound by memory draw
  541 W at the highest clock, eager permutes, norms, rotations and the optimizer 436 to 540 W, where the H200's
  draw 640 W with its faster memory. Mixes that had no part in the numbers are met within 3.5 %. `collective` is the
  H200's. No training step was looked at.
""",
}

CARRIED = """\
# Written by lab/profiles/power_law.py from lab/results/2026-11-22-h200-power.json.xz.
name: {of}-power
accelerator: any
software: "as h200-power"
description: Power of kernel classes against the clock, carried from an H200 (part of other profiles).
evidence: >-
  The law of h200-power with another highest clock. No power or clock of this architecture was measured by us.
  No training step was looked at.
"""


def profile_text(law: PowerLaw, of: str) -> str:
    """The profile in YAML."""
    head = HEADS[of] if of in HEADS else CARRIED.format(of=of)
    body = law.model_dump(exclude_none=True, exclude_defaults=True)
    lines = [f"  {key}: {json.dumps(value)}" for key, value in body.items() if key != "classes"]
    lines.append("  classes:")
    lines += [f"    {key}: {json.dumps(value)}" for key, value in body["classes"].items()]
    return head + "power:\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
