"""Loads: logs and what is wrong with them, drawn arrivals and lengths, repeats; hits of a log in a cache."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from lab.packed import RESULTS

from moesim.hwmodels.errors import InputError
from moesim.simulator.scenario.serving import ServingLoad
from moesim.simulator.serving import requests as requests_module
from moesim.simulator.serving.requests import (
    Requests,
    arrivals,
    load_requests,
    read_log,
    repeated,
    requests_of,
)
from moesim.simulator.serving.scheduler import PrefixCache

MOONCAKE = RESULTS / "2024-mooncake-conversation.jsonl.xz"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(text, "utf-8")
    return path


def test_the_hits_of_mooncakes_conversations_are_exact() -> None:
    log, cache, tokens = read_log(MOONCAKE), PrefixCache(), 0
    for request, length in enumerate(log.input_tokens.tolist()):
        ids = log.block_ids(request)
        tokens += min(cache.matched(ids) * log.block_tokens, length)
        cache.take(ids, 0)
        cache.release(ids)
    assert (cache.hits, cache.asked) == (105_710, 288_500)
    assert (tokens, log.input_tokens.sum()) == (54_098_411, 144_793_823)


def test_idle_blocks_go_the_least_recently_used_first() -> None:
    cache = PrefixCache(capacity=4)
    for ids in ([1, 2], [3]):
        cache.take(ids, 0)
        cache.release(ids)
    assert cache.fits(3, [9]) and not cache.fits(4, [9])
    cache.take(
        [9], 1
    )  # four are asked for, with two idle ones, so the oldest idle one goes: the end of a prompt
    assert cache.matched([1, 2]) == 1 and cache.matched([3]) == 1 and cache.evicted == 1


def test_azures_seven_digits_and_disorder_are_read(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:47.1234567,20,3\n2023-11-16 18:15:46.6805900,10,2\n"
    )
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    log = read_log(path)
    assert log.arrival_ns.tolist() == [0, 442_866_700]
    assert log.input_tokens.tolist() == [10, 20]
    assert log.notes == ("1 requests of the load came before the one above them; they were sorted by time",)


def test_a_gap_in_a_log_is_said(tmp_path: Path) -> None:
    times = [*range(50), *range(9000, 9050)]
    rows = "".join(f"{time},5,5\n" for time in times)
    log = read_log(written(tmp_path, f"arrival_s,input_tokens,output_tokens\n{rows}"))
    assert len(log.notes) == 1 and "no request comes for 8,951 s after request 50" in log.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("when,in,out\n0,1,1\n", "its columns are when, in, out"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "line 2: 0, 1,  is no time"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\n0,0,1\n", "line 2: a request has 0 input tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
        ('{"timestamp": 0, "input_length": 5}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 0}\n', "line 1: a request has 0 output"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "1 blocks of 512"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n'
            '{"timestamp": 0, "input_length": 5, "output_length": 1}\n',
            "line 2 has no `hash_ids`",
        ),
    ],
)
def test_what_is_wrong_with_a_log_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_log(written(tmp_path, text))


@pytest.mark.parametrize(("burstiness", "spread"), [(0.0, 0.0), (1.0, 1.0), (4.0, 4.0)])
def test_gaps_have_the_stated_mean_and_spread(burstiness: float, spread: float) -> None:
    gaps = np.diff(arrivals(10.0, 20_000, 0, burstiness)) / 1e9
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(spread, rel=0.1, abs=1e-9)


def test_drawn_lengths_have_their_mean() -> None:
    load = ServingLoad(
        rate_per_s=5,
        requests=20_000,
        input_tokens=300,
        output_tokens=100,
        length_spread=0.8,
        cached_share=0.25,
    )
    drawn = load_requests(load, 1)
    assert drawn.input_tokens.mean() == pytest.approx(300, rel=0.03)
    assert drawn.output_tokens.mean() == pytest.approx(100, rel=0.03)
    assert drawn.cached_share == 0.25
    assert load_requests(load, 1).arrival_ns.tobytes() == drawn.arrival_ns.tobytes()
    assert load_requests(load, 2).arrival_ns.tobytes() != drawn.arrival_ns.tobytes()


def test_a_log_is_cut_stretched_and_repeated(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens\n0,1,5\n1,2,6\n3,3,7\n")
    assert len(load_requests(ServingLoad(log=str(path), requests=2), 0)) == 2
    stretched = load_requests(ServingLoad(log=str(path), rate_per_s=1), 0)
    assert stretched.arrival_ns[-1] == 2_000_000_000
    more = repeated(read_log(path), 9, 3)
    assert len(more) == 9 and more.arrival_ns[-1] <= 3_000_000_000
    assert sorted(more.input_tokens.tolist()) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(np.diff(more.arrival_ns) >= 0)


def test_a_gap_is_noted_only_where_the_load_has_it(tmp_path: Path) -> None:
    path = written(tmp_path, "arrival_s,input_tokens,output_tokens\n0,1,1\n1,1,1\n2,1,1\n900,1,1\n")
    assert "898 s" in load_requests(ServingLoad(log=str(path)), 0).notes[0]
    assert load_requests(ServingLoad(log=str(path), requests=3), 0).notes == ()


def test_some_requests_keep_their_blocks() -> None:
    log = requests_of([0, 1, 2], [8, 4, 8], [1, 1, 1], [[1, 2], [3], [1, 4]], 4)
    part: Requests = log.some(np.array([0, 2]))
    assert [part.block_ids(i) for i in range(2)] == [[1, 2], [1, 4]] and part.arrival_ns.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"log": "x.csv", "input_tokens": 5},
            "input_tokens would not be read: a log says.*load={log: x.csv}",
        ),
        ({"rate_per_s": 1, "requests": 10_000_001}, "state at most that"),
        ({"arrivals": "concurrency"}, "go together"),
        ({"concurrency": 4}, "go together"),
        ({"arrivals": "concurrency", "concurrency": 4, "rate_per_s": 1}, "rate_per_s would not be read"),
        ({"burstiness": 3.0}, "burstiness would not be read: arrivals=poisson"),
        ({"block_tokens": 16, "rate_per_s": 1}, "block_tokens would not be read"),
    ],
)
def test_keys_that_nothing_reads_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServingLoad(**keys)


def test_a_load_says_when_requests_come() -> None:
    with pytest.raises(InputError, match="state rate_per_s"):
        load_requests(ServingLoad(), 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival_s,input_tokens,output_tokens\n", "a head and no requests"),
        ("arrival_s,input_tokens,output_tokens\n0,10,5,7\n", "line 2: it has more fields"),
        ("arrival_s,input_tokens,output_tokens,arrival_s\n0,10,5,0\n", "arrival_s more than once"),
    ],
)
def test_tables_that_would_be_read_in_part_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        read_log(tmp_path / "log.csv")


def test_columns_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user, arrival_s, input_tokens, output_tokens\nme, 0, 10, 5\n")
    assert "not read: user" in read_log(tmp_path / "log.csv").notes[0]


def test_a_log_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MOST_BYTES", 1000)
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(b"arrival_s,input_tokens,output_tokens\n" + b"0,1,1\n" * 1000))
    with pytest.raises(InputError, match="more than 1,000 bytes"):
        read_log(path)


@pytest.mark.parametrize(("ids", "words"), [([1, 1], "a block id twice"), ([1, 2, 3], "has 3 blocks")])
def test_block_ids_cover_the_prompt_once(ids: list[int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        requests_of([0], [8], [1], [ids], 4)


def test_the_first_time_of_a_repeated_log_is_the_log_and_others_move_by_a_mean_gap() -> None:
    log = requests_of(np.arange(5) * 1000, [1, 2, 3, 4, 5], [1] * 5)
    assert repeated(log, 5, 3).arrival_ns.tolist() == log.arrival_ns.tolist()
    twice = repeated(log, 10, 3)
    for length, moment in zip(log.input_tokens, log.arrival_ns, strict=True):
        times = twice.arrival_ns[twice.input_tokens == length]
        assert len(times) == 2 and moment in times
        assert (np.abs(times - moment) <= 1000).all() and (times >= 0).all() and (times <= 4000).all()
    assert twice.arrival_ns[0] == 0 and (np.diff(twice.arrival_ns) >= 0).all()
    alone = repeated(requests_of([0], [1], [1]), 3, 0)
    assert alone.arrival_ns.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("times", "inputs", "words"),
    [
        ([float("nan")], [1], "arrival_ns of request 1 is nan"),
        ([1e308], [1], "below 2"),
        ([2**62], [1], "arrival_ns of request 1"),
        ([0], [1.5], "input_tokens of request 1 is 1.5"),
        ([0, 1], [1], "2 arrivals, 1 prompts"),
        (["x"], [1], "a list of whole numbers"),
        ([[0]], [1], "a list of whole numbers"),
        (0, [1], "a list of whole numbers"),
    ],
)
def test_what_is_no_list_of_whole_numbers_is_refused(times: object, inputs: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        requests_of(times, inputs, [1])
