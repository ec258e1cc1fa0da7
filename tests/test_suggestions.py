"""Misspelt names find what they mean, and nonsense finds nothing."""

from __future__ import annotations

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.known_names import close_names
from flexgen_helm.run_specs import run_spec_names
from flexgen_helm.suggestions import closest, listed

MODELS = {
    "llama3-8b": "llama-3-8b",
    "opt6.7b": "opt-6.7b",
    "Qwen3-8B": "qwen3-8b",
    "qwen-8b": "qwen3-8b",
    "gemma2-9b-it": "gemma-2-9b-it",
    "8b-instruct": "llama-3-8b-instruct",
    "phi-3-mini": "phi-3-mini-4k-instruct",
    "Llama-2-7b-hf": "llama-2-7b",
    "Meta-Llama-3-8B": "llama-3-8b",
    "meta-llama/Llama-3.1-8b": "llama-3.1-8b",
    "facebok/opt-6.7b": "opt-6.7b",
    "smolm2-135m-instruct": "smollm2-135m-instruct",
    "opt-126m": "opt-125m",
    "gpt2-xxl": "gpt2-xl",
}
SCENARIOS = {
    "simple_mcq": "simple_mcqa",
    "lambda": "lambada",
    "wikitxt": "wikitext",
    "mmul": "mmlu",
    "gsm8k": "gsm",
    "xsum": "summarization_xsum",
    "truthfulqa": "truthful_qa",
    "wikitext103": "wikitext_103",
}


def test_a_misspelt_name_is_found_first():
    assert {typed: close_names(typed)[0] for typed in MODELS} == MODELS
    assert {typed: closest(typed, run_spec_names())[0] for typed in SCENARIOS} == SCENARIOS


def test_a_family_finds_its_members():
    assert set(close_names("smollm2")) == {name for name in CATALOG if name.startswith("smollm2")}
    assert all(name.startswith("mistral-7b") for name in close_names("mistral7b"))


def test_what_is_like_nothing_finds_nothing():
    assert not any(map(close_names, ["", "-", "bert-base", "falcon-40b", "tinyllama", "zzz"]))


def test_lists_for_sentences():
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == [
        "a",
        "a or b",
        "a, b or c",
    ]
