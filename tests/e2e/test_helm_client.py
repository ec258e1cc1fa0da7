"""Our client and HELM's own on the same weights: the same token ids, completions and metrics, but
for its defects.
"""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from flexgen_helm.benchmarks.clients import differences
from flexgen_helm.benchmarks.helm_runs import read_runs
from tests.helpers.both_clients import CHAT, RAW, Job, run_both
from tests.helpers.chat_models import CHATML
from tests.helpers.data_sets import WORDS
from tests.helpers.shares import IS_WHOLE
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

POSITIONS = 3000
MMLU = "mmlu:subject=anatomy"
GENERATED = {
    "generation": "simple_classification",
    "stop string of two tokens": "gsm:num_output_tokens=30",
    "several completions": "gsm:num_outputs=2,num_output_tokens=12",
    "multiple choice": MMLU,
    "data augmentation": f"{MMLU},data_augmentation=robustness",
}
# HELM's client puts these through the chat template too, so that it scores another text; ours never
# does.
SCORED = {
    "scored choices": f"{MMLU},method=multiple_choice_separate_original",
    "calibrated choices": f"{MMLU},method=multiple_choice_separate_calibrated",
    "language modelling": "twitter_aae:demographic=aa",
}
if IS_WHOLE:  # 20 pairs of runs
    GENERATED |= {
        "short questions": "simple_mcqa",
        "rules and facts": "synthetic_reasoning_natural:difficulty=easy",
        "patterns": "synthetic_reasoning:mode=pattern_match",
    }
    SCORED["scored choices with examples"] = "simple_mcqa_scored"
ENTRIES = {RAW: GENERATED | SCORED, CHAT: GENERATED}
PROMPT = "Question: the quick brown fox\nAnswer:"
GREEDY: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0,
    "max_tokens": 30,
    "stop_sequences": [],
}
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the quick brown fox"},
    {"role": "assistant", "content": "jumps"},
    {"role": "user", "content": "over?"},
]
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    # A top-p of almost nothing leaves the most probable token, so that both draw the same.
    "top-p": {**GREEDY, "temperature": 1.0, "top_p": 1e-6, "num_completions": 3},
    "sampled": {**GREEDY, "temperature": 1.0, "num_completions": 5},
    "stop strings": {**GREEDY, "stop_sequences": ["a", "e", "o", "i", "th"]},
}
ECHO = {"echo": {**GREEDY, "max_tokens": 0, "echo_prompt": True}}
CHATS = {"turns": {**GREEDY, "prompt": "", "messages": TURNS}}


def write_scenarios(folder):
    """Made-up data where HELM's scenarios look for it."""
    draw = random.Random(3)

    def words(count):
        return " ".join(draw.choices(WORDS, k=count))

    for split, count in (("dev", 5), ("test", 6)):
        path = folder / "mmlu" / "data" / split / f"anatomy_{split}.csv"
        path.parent.mkdir(parents=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(
                [words(8), *(words(2) for _ in "ABCD"), draw.choice("ABCD")] for _ in range(count)
            )
    (folder / "gsm").mkdir()
    for split in ("train", "test"):
        lines = [{"question": f"{words(9)}?", "answer": f"{words(5)}\n#### {i}"} for i in range(6)]
        (folder / "gsm" / f"gsm_data_{split}").write_text("\n".join(map(json.dumps, lines)))
    (folder / "twitter_aae").mkdir()
    (folder / "twitter_aae" / "aa_tweets.csv").write_text("\n".join(words(12) for _ in range(6)))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    model = folder / "model"
    save_random(model, llama_config(max_position_embeddings=POSITIONS), seed=11)
    save_tokenizer(model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    write_scenarios(folder / "benchmark_output" / "scenarios")
    job = Job(
        entries={model: entries for pair, entries in ENTRIES.items() for model in pair},
        requests={
            model: REQUESTS | (ECHO if pair is RAW else CHATS) for pair in ENTRIES for model in pair
        },
        instances=3,
    )
    return run_both(folder, model, POSITIONS, job)


@pytest.mark.fast(1)
@pytest.mark.parametrize("pair", ENTRIES, ids=["raw", "chat"])
def test_both_models_are_fed_the_same_token_ids(outcome, pair):
    ours, theirs = (outcome.fed[model] for model in pair)
    assert sorted(ours) == sorted(theirs) and len(ours) >= 12
    assert outcome.fed_by_request[pair[0]] == outcome.fed_by_request[pair[1]]


def test_a_chat_template_makes_other_token_ids(outcome):
    """The inverse: what is fed shows the template."""
    raw, chat = ({tuple(ids) for ids in outcome.fed[pair[0]]} for pair in (RAW, CHAT))
    assert not raw & chat
    longer = len(outcome.fed_by_request[CHAT[0]]["greedy"]) - len(
        outcome.fed_by_request[RAW[0]]["greedy"]
    )
    assert longer > 10


@pytest.mark.parametrize(
    "pair, kind",
    [(pair, kind) for pair, entries in ENTRIES.items() for kind in entries],
    ids=lambda value: value[0],
)
def test_completions_and_metrics_are_equal(outcome, pair, kind):
    ours, theirs = (read_runs([Path(outcome.folders[model][kind])], 0.0) for model in pair)
    assert ours.texts == theirs.texts and len(ours.texts) >= 3
    assert len(ours.stats) >= 15
    differing = differences(ours.stats, theirs.stats)
    assert [line for line in differing if line["why"] is None] == []
    if kind in SCORED:  # only what HELM's client says of the reason for which it ends
        assert all("finish_reason" in line["metric"] for line in differing)


def test_a_metric_that_differs_is_found(outcome):
    """The inverse: the same scenario with and without the template differs in more than known
    defects.
    """
    raw, chat = (
        read_runs([Path(outcome.folders[pair[0]]["generation"])], 0.0) for pair in (RAW, CHAT)
    )
    assert raw.texts != chat.texts
    assert [line for line in differences(raw.stats, chat.stats) if line["why"] is None]


@pytest.mark.parametrize("pair", ENTRIES, ids=["raw", "chat"])
def test_single_requests_are_answered_alike(outcome, pair):
    ours, theirs = (outcome.completions[model] for model in pair)

    def texts(completions):
        return [completion["text"] for completion in completions]

    for kind in ours.keys() - {"sampled", "echo"}:
        assert texts(ours[kind]) == texts(theirs[kind]) != [], kind
    assert len(ours["sampled"]) == len(theirs["sampled"]) == 5  # HELM's client has no seed
    assert texts(ours["top-p"]) == 3 * texts(ours["greedy"])
    (stopped,), (whole,) = texts(ours["stop strings"]), texts(ours["greedy"])
    assert whole.startswith(stopped) and stopped != whole


def test_scored_prompts_have_the_same_log_probabilities(outcome):
    (ours,), (theirs,) = (outcome.completions[model]["echo"] for model in RAW)
    assert [token["text"] for token in ours["tokens"]] == [
        token["text"] for token in theirs["tokens"]
    ]
    logprobs = [token["logprob"] for token in theirs["tokens"]]
    assert [token["logprob"] for token in ours["tokens"]] == pytest.approx(
        logprobs, abs=1e-4
    ) and min(logprobs) < -1
