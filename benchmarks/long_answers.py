"""`bench long_answers`: many answers that end long before `max_tokens`, in little memory for the KV cache.

The cache has room for a fifth of what all answers would take if each had `max_tokens` tokens. Reserving that much for
each sequence is compared with what the engine does: caches that grow by pages, admission by expected length, and
preemption. Both give the same tokens, which are those of ample memory. Weights are in memory, where a pass takes as
long as its products, or on the disk, where a pass takes at least as long as reading them.

The model is random, and small enough for the benchmark to take minutes; its weights of 100 MB are larger than a
processor's cache, and one head of keys serves eight, as in large models. Its EOS has a probability of about 1 / 400 at
each token, and a third of the requests have a stop string that is met early, so lengths are spread widely.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.common import machine, refuse_engine_flags
from flexgen_helm.planner import run_memory
from flexgen_helm.report.throughput import versions
from flexgen_helm.request import GenerationRequest, MemoryLimits

VOCABULARY = 320
# The worst case over the room for the cache.
SCARCITY = 5
SHORTEST, LONGEST = 5, 1500


@dataclass(frozen=True)
class Workload:
    """requests: number. max_tokens: of each. hidden, layers: of the model. repeats: of each side."""

    requests: int = 200
    max_tokens: int = 2048
    hidden: int = 512
    layers: int = 8
    repeats: int = 3


QUICK = Workload(requests=12, max_tokens=160, hidden=32, layers=2, repeats=1)
WAYS = ("reserving max_tokens", "pages and preemption")
# Where the weights are -> engine arguments, and bytes besides cache and resident weights: staging and hidden states.
PLACES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "in memory": ({}, 0),
    "on the disk": ({"policy": "128x4,0,0,0,100,0,100", "schedule": "zigzag"}, 24 << 20),
}


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark; rows are in seconds."""
    refuse_engine_flags("long_answers", options)
    workload = QUICK if options.quick else Workload()
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        return measure(workload, options.repeats or workload.repeats, Path(scratch), options)


def measure(workload: Workload, repeats: int, folder: Path, options: Options) -> dict[str, Any]:
    save_model(folder, workload)
    asked, expected, room, weights = choose(workload, folder)
    lengths = sorted(map(len, expected))
    options.tell(
        f"{len(asked)} answers of {lengths[0]} to {lengths[-1]} tokens, {sum(lengths):,} in all; the cache may take "
        f"{room / 2**20:.0f} MiB of {SCARCITY * room / 2**20:.0f}"
    )
    records: dict[str, list[dict[str, Any]]] = {f"weights {place}, {way}": [] for place in PLACES for way in WAYS}
    for repeat in range(repeats):
        for place, (engine, more_bytes) in PLACES.items():
            limit = room + (more_bytes or weights)
            for way in WAYS:
                label = f"weights {place}, {way}"
                with reserving(way == WAYS[0]):
                    record, tokens = answer(folder, asked, limit, {**engine, "offload_dir": folder / "offload"})
                record["equal_tokens"] = sum(map(tuple.__eq__, tokens, expected))
                records[label].append(record)
                options.tell(
                    f"{label}: {record['latency_s']:.1f} s, {record['equal_tokens']} of {len(asked)} answers equal, "
                    f"{record['preemptions']} preemptions ({repeat + 1} of {repeats})"
                )
    rows = [row(label, own, sum(lengths)) for label, own in records.items()]
    return {
        "name": "long_answers",
        "hardware": {**machine(), **next(iter(records.values()))[0]["hardware"]},
        "versions": versions(),
        "workload": {
            "requests": len(asked),
            "max_tokens": workload.max_tokens,
            "lengths": {"min": lengths[0], "median": lengths[len(lengths) // 2], "max": lengths[-1]},
            "output_tokens": sum(lengths),
            "cache_bytes": room,
            "scarcity": SCARCITY,
        },
        "rows": rows,
        "ratios": {
            f"throughput, weights {place}": rows[i]["median"] / rows[i + 1]["median"]
            for i, place in zip(range(0, len(rows), 2), PLACES)
        },
        "notes": ["ratios compare the engine with itself; one process, in alternation"],
    }


def row(way: str, records: Sequence[dict[str, Any]], output_tokens: int) -> dict[str, Any]:
    seconds = [record["latency_s"] for record in records]
    line = {"label": way, **summary(seconds), "seconds": seconds}
    line["tokens_per_s"] = output_tokens / line["median"]
    for key in ("equal_tokens", "preemptions"):
        line[key] = [record[key] for record in records]
    line["peak_share_of_limit"] = max(record["peak_bytes"]["cpu"] / record["limit_bytes"]["cpu"] for record in records)
    return line


def choose(workload: Workload, folder: Path) -> tuple[list[GenerationRequest], list[tuple[int, ...]], int, int]:
    """Answer more requests than needed with ample memory, and keep those whose answers are neither short nor long.

    Returns the requests, their tokens, the bytes for the cache, and those of the weights.
    """
    from flexgen_helm.engine.engine import Engine

    candidates = [request(i, workload.max_tokens) for i in range(workload.requests * 5 // 4)]
    with Engine.from_pretrained(folder, device="cpu") as engine:
        weights = engine.ledger.in_use
        token_bytes = engine.config.kv_bytes_per_token(4)
        results = engine.run(candidates)
    kept = [
        (asked, result.completions[0].token_ids)
        for asked, result in zip(candidates, results)
        if SHORTEST <= len(result.completions[0].token_ids) <= min(LONGEST, workload.max_tokens - 1)
    ][: workload.requests]
    worst = sum(len(asked.prompt_token_ids or ()) + workload.max_tokens for asked, _ in kept)
    return [asked for asked, _ in kept], [tokens for _, tokens in kept], worst * token_bytes // SCARCITY, weights


def request(number: int, max_tokens: int) -> GenerationRequest:
    """Return a request with a prompt of 10 to 60 tokens of its own."""
    prompt = [2 + (31 * number + j * j + 7 * j) % (VOCABULARY - 2) for j in range(10 + number * 7 % 51)]
    stop = ["x"] if number % 3 == 0 else []
    return GenerationRequest(prompt_token_ids=prompt, max_tokens=max_tokens, temperature=1.0, seed=number, stop=stop)


def answer(
    folder: Path, asked: list[GenerationRequest], limit: int, options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Answer all requests under a memory limit; return the record and the tokens."""
    from flexgen_helm.engine.engine import Engine

    with Engine.from_pretrained(folder, device="cpu", limits=MemoryLimits(cpu=limit), **options) as engine:
        results = engine.run(asked)
        return dict(engine.last_run), [result.completions[0].token_ids for result in results]


@contextmanager
def reserving(on: bool) -> Iterator[None]:
    """Let every sequence have the cache of its longest possible answer from the beginning."""
    threshold = run_memory.LONG_ANSWER_TOKENS
    if on:
        run_memory.LONG_ANSWER_TOKENS = 1 << 30
    try:
        yield
    finally:
        run_memory.LONG_ANSWER_TOKENS = threshold


def save_model(folder: Path, workload: Workload) -> None:
    """Save a random Llama and a tokenizer of bytes. The logit of EOS is 0, that of other tokens random."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet)
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog and runs away from it all"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=workload.hidden,
            intermediate_size=3 * workload.hidden,
            num_hidden_layers=workload.layers,
            num_attention_heads=8,
            num_key_value_heads=1,
            max_position_embeddings=workload.max_tokens + 64,
            tie_word_embeddings=False,
            eos_token_id=0,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        # Logits are sums of `hidden` products of a normed state with a row, so their standard deviation is 0.67.
        model.lm_head.weight.normal_(0.0, 0.67 / workload.hidden**0.5)
        model.lm_head.weight[0] = 0.0
    model.half().save_pretrained(folder)
