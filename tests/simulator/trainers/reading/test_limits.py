"""Hostile launch files end at a limit of work, size or depth, with a message and without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesim.hwmodels.errors import InputError
from moesim.simulator.trainers.reading import limits, read_launch


def refusal(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        read_launch(file)
    return str(raised.value)


def recipe(*lines: str, result: str = "Config(x=a)") -> str:
    return "def recipe():\n" + "".join(f"    {line}\n" for line in (*lines, f"return {result}"))


TOO_LARGE = "more than 100,000 elements and characters"
TOO_MUCH = "steps, the limit"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (recipe("a = [1] * 5000", "b = [a] * 5000", "c = [b] * 5000", "a = [c] * 2"), TOO_LARGE),
        (recipe("a = [1]", *["a.extend(a)"] * 29), TOO_LARGE),
        (recipe("s = 'x' * 5000", "a = str([str([s] * 5000)] * 5000)"), TOO_LARGE),
        (
            recipe(
                "a = Config(x=1)",
                *["a = Config(p=a, q=a, r=a, s=a)"] * 13,
            ),
            TOO_MUCH,
        ),
        (recipe("a = Config()", "a.p = a", "a.q = a", "a.r = a", result="a"), TOO_MUCH),
        (recipe("a = [Config(x=1)]", *["a = [Config(p=a, q=a, r=a)]"] * 13, result="a"), "no configuration"),
        (recipe("a = []", "a.append(a)"), "holds itself"),
        (recipe("a = [1]", "a[0] = a"), "holds itself"),
        (recipe("a = {}", "a.update({'k': [a]})"), "holds itself"),
        (recipe("a = []", "b = [a]", "a.append(b)"), "holds itself"),
        (recipe("a = []", *["a = [a]"] * 900), "40 levels"),
        (recipe("a = {}", *["a = {'k': a}"] * 900), "40 levels"),
        (recipe("a = [" + "[" * 900 + "]" * 900 + "]"), "brackets"),
        (recipe("a = 0x" + "f" * 3600), "line 2: a whole number of 14,400 bits"),
    ],
)
def test_a_recipe_ends_at_a_limit(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, "recipe.py", text)


def test_a_list_is_no_key_of_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(recipe("d = {}", "a = d.get([1])"))
    assert [argument.name for argument in read_launch(file).arguments] == ["x"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("plan.toml", ".".join(["a"] * 990) + " = 1\n", "more than 40 parts"),
        ("plan.toml", "[training]\nsteps = 0x" + "f" * 3600, "line 2: training.steps: a whole number"),
        ("plan.toml", "[training]\nsteps = [0x" + "f" * 3600 + "]", "a whole number of 14,400 bits"),
        ("plan.json", '{"a": ' + "[" * 900 + "]" * 900 + "}", "40 levels"),
        ("plan.json", '{"a": ' * 900 + "1" + "}" * 900, "40 levels"),
        ("plan.yaml", "a: 0x" + "f" * 3600, "0xfff"),
    ],
)
def test_a_configuration_ends_at_a_limit(tmp_path: Path, name: str, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, name, text)


START = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $N\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("".join(f'A{n}="A{n + 1}+A{n + 1}"\n' for n in range(20)) + "A20=1\nN=$((A0))\n", TOO_MUCH),
        ("X=" + "a" * 3900 + "\nN=${X//*a*a*b/}\n", TOO_MUCH),
        ("".join(f"V{n}={n}\n" for n in range(800)) + "if [ -f /x ]; then N=1; fi\n" * 600, TOO_MUCH),
        ("".join(f"if [ -f /x{n} ]; then N={n}; fi\n" for n in range(700)), "conditions leave open"),
        ("for i in {1..900}; do echo ${UNSET:+" + "x" * 100_000 + "}; done\n", TOO_MUCH),
    ],
)
def test_a_script_ends_at_a_limit(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, "run.sh", text + START)


def test_what_no_limit_foresees_is_a_message_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("unhashable type: 'list'")

    monkeypatch.setattr(limits.Budget, "step", broken)
    assert "recipe.py: cannot be read: TypeError" in refusal(tmp_path, "recipe.py", recipe("a = 1"))
