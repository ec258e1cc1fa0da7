"""llama.cpp out of the wheel `xllamacpp`: the next token's log-probabilities, or None for a file that it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Its log and its exit on bad files stay out of the test's process.
_PROGRAM = """
import json, sys, xllamacpp
from urllib.request import Request, urlopen
for line in sys.stdin:
    path, ids, size, text = json.loads(line)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 256, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.hostnames, params.port = ["127.0.0.1"], 0
    try:
        server = xllamacpp.Server(params)
    except RuntimeError:
        print("ANSWER null", flush=True)
        continue
    asked = {"prompt": ids, "n_predict": 1, "n_probs": size, "temperature": 0, "ignore_eos": False}
    told = server.handle_completions(asked)
    told = told if isinstance(told, dict) else json.loads(told)
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    url = server.listening_address + "/tokenize"
    tokens = json.load(urlopen(Request(url, body, {"Content-Type": "application/json"})))
    print("ANSWER " + json.dumps([told, tokens]), flush=True)
    del server
"""


def answers(
    files: Sequence[Path], ids: Sequence[int], size: int, text: str = ""
) -> list[tuple[np.ndarray, list[int]] | None]:
    """Return each file's log-probabilities behind `ids`, [size], and the tokens of `text`; None if it is refused."""
    asked = "".join(json.dumps([str(file), list(ids), size, text]) + "\n" for file in files)
    told = subprocess.run([sys.executable, "-c", _PROGRAM], input=asked, capture_output=True, text=True, timeout=240)
    lines = [json.loads(line[7:]) for line in told.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(lines) == len(files), told.stderr[-3000:]
    return [None if line is None else (_logprobs(line[0], size), line[1]["tokens"]) for line in lines]


def _logprobs(told: dict, size: int) -> np.ndarray:
    values = np.full(size, np.nan)
    for entry in told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        values[entry["id"]] = entry["logprob"]
    return values
