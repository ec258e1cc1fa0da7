"""Lengths of the shipped run entries, for plans on machines without their data. Imports nothing of HELM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

# Assumed prompts may be so many times as long, or as short.
ASSUMED_FACTOR = 1.5


@dataclass(frozen=True)
class EntryLengths:
    """What one run entry asks, in means over its requests.

    instances: of the data set's evaluated splits.
    prompt: tokens of a prompt.
    shared: tokens of a prompt that are computed once for the whole entry: its examples, as a rule.
    answer: tokens that an answer is expected to have.
    max_tokens: most tokens of an answer, by HELM's run spec.
    basis: 'measured' on real prompts, 'published', or 'assumed'.
    source: where the lengths come from, for people.
    requests: of one instance.
    completions: of one request.
    scored: the log-probabilities of the prompt are asked for.
    """

    instances: int
    prompt: float
    shared: float
    answer: float
    max_tokens: int
    basis: Literal["measured", "published", "assumed"]
    source: str
    requests: float = 1.0
    completions: int = 1
    scored: bool = False


def lengths_of(scenario: str, arguments: Mapping[str, str]) -> tuple[EntryLengths, list[str]] | None:
    """Return the lengths of an entry and the arguments that they do not know; None for an unknown scenario.

    Of several records of a scenario, the one whose arguments are all given, and most of them, is taken.
    """
    fitting = [
        (len(known), lengths, known)
        for name, known, lengths in LENGTHS
        if name == scenario and known.items() <= arguments.items()
    ]
    if not fitting:
        return None
    _, lengths, known = max(fitting, key=lambda record: record[0])
    unread = [f"{key}={value}" for key, value in arguments.items() if key not in known and key not in _LIKE]
    return lengths, unread


# Arguments whose values have about the same lengths.
_LIKE = ("stop", "method")
_OWN = "measured on the prompts of -m 1000 with SmolLM2's tokenizer"
_PAPER = "the FlexGen paper's table of HELM scenarios, whose prompts are padded; what they share is not published"
# 1.35 tokens a word; the sums say how many examples of how many words.
_WORDS = "1.35 tokens a word"

_MMLU = EntryLengths(111, 416, 355, 1, 1, "assumed", "as the two subjects that were measured")
_MATH = EntryLengths(
    135, 1070, 950, 130, 400, "assumed", f"9 problems of 30 words with solutions of 55, {_WORDS}; answers as GSM8K's"
)
_WMT = EntryLengths(
    6000, 155, 95, 35, 100, "assumed", f"2 sentences of 25 words, English of {_WORDS}, the other language of 2"
)
_SCRIPT = replace(_WMT, prompt=265, shared=150, source=f"{_WMT.source} x 2 for its script")
_NATURAL_QA = EntryLengths(1750, 170, 140, 8, 300, "assumed", f"6 questions of 10 words with answers of 6, {_WORDS}")


def _legalbench(instances: int, tokens: int, instructions: int) -> EntryLengths:
    """Return lengths of prompts with five examples; tokens: of an example's text."""
    example = tokens + 8
    return EntryLengths(
        instances,
        instructions + 6 * example,
        instructions + 5 * example,
        4,
        30,
        "assumed",
        f"6 texts of {tokens} tokens, the mean of LegalBench's training examples",
    )


def _synthetic(prompt: float, shared: float, answer: float, max_tokens: int) -> EntryLengths:
    return EntryLengths(10_000, prompt, shared, answer, max_tokens, "measured", _OWN)


def _reasoned(instances: int, prompt: int, answer: int, what: str, max_tokens: int = 4096) -> EntryLengths:
    """Return lengths of prompts without examples, whose answers are explained."""
    source = f"{what}, {_WORDS}; answers of {answer} tokens, as instruct models explain theirs"
    return EntryLengths(instances, prompt, min(10, prompt // 2), answer, max_tokens, "assumed", source)


def _wrangling(sequences: int, prompt: int) -> EntryLengths:
    return EntryLengths(sequences, prompt, 0, 3, 5, "published", "the FlexGen paper's table of data wrangling, padded")


# Run spec, the arguments that a record is for, lengths.
LENGTHS: tuple[tuple[str, Mapping[str, str], EntryLengths], ...] = (
    # HELM Lite
    (
        "narrative_qa",
        {},
        EntryLengths(470, 5370, 4470, 8, 100, "assumed", f"6 summaries of 650 words, {_WORDS}; 470 documents"),
    ),
    ("natural_qa", {"mode": "closedbook"}, _NATURAL_QA),
    (
        "natural_qa",
        {"mode": "openbook_longans"},
        replace(_NATURAL_QA, prompt=1380, shared=1150, source=f"6 passages of 150 words with questions, {_WORDS}"),
    ),
    (
        "commonsense",
        {"dataset": "openbookqa"},
        EntryLengths(500, 320, 270, 1, 1, "assumed", f"6 questions of 11 words with 4 choices of 3, {_WORDS}"),
    ),
    ("mmlu", {}, _MMLU),
    ("mmlu", {"subject": "abstract_algebra"}, EntryLengths(111, 387, 326, 1, 1, "measured", _OWN)),
    ("mmlu", {"subject": "us_foreign_policy"}, EntryLengths(111, 445, 384, 1, 1, "measured", _OWN)),
    *(
        (
            "math",
            {"subject": subject, "level": "1", "use_chain_of_thought": "True"},
            replace(_MATH, instances=instances),
        )
        for subject, instances in (
            ("algebra", 135),
            ("counting_and_probability", 39),
            ("geometry", 38),
            ("intermediate_algebra", 52),
            ("number_theory", 30),
            ("prealgebra", 86),
            ("precalculus", 57),
        )
    ),
    ("gsm", {}, EntryLengths(1319, 1228, 1137, 129, 400, "measured", _OWN)),
    ("gsm", {"stop": "none"}, EntryLengths(1319, 1161, 1096, 129, 400, "measured", _OWN)),
    ("legalbench", {"subset": "abercrombie"}, _legalbench(95, 11, 100)),
    ("legalbench", {"subset": "corporate_lobbying"}, _legalbench(490, 1085, 50)),
    ("legalbench", {"subset": "international_citizenship_questions"}, _legalbench(9306, 37, 20)),
    ("legalbench", {"subset": "function_of_decision_section"}, _legalbench(367, 58, 150)),
    ("legalbench", {"subset": "proa"}, _legalbench(95, 41, 50)),
    (
        "med_qa",
        {},
        EntryLengths(2545, 1130, 940, 1, 1, "assumed", f"6 questions of 120 words with 4 choices of 4, {_WORDS}"),
    ),
    *(("wmt_14", {"language_pair": f"{language}-en"}, _WMT) for language in ("cs", "de", "fr")),
    *(("wmt_14", {"language_pair": f"{language}-en"}, _SCRIPT) for language in ("hi", "ru")),
    # HELM Capabilities
    ("mmlu_pro", {"subject": "all"}, _reasoned(12_032, 260, 400, "questions of 60 words with 10 choices of 8")),
    ("gpqa", {"subset": "main"}, _reasoned(448, 270, 600, "questions of 90 words with 4 choices of 10")),
    ("ifeval", {}, _reasoned(541, 55, 400, "instructions of 40 words")),
    ("wildbench", {"subset": "v2"}, _reasoned(1024, 500, 700, "conversations of 370 words", 2000)),
    ("omni_math", {}, _reasoned(4428, 110, 800, "problems of 50 words, half of them formulas")),
    # HELM Safety
    (
        "bbq",
        {"subject": "all", "max_train_instances": "0"},
        EntryLengths(58_492, 85, 12, 1, 1, "assumed", f"passages of 30 words, questions and 3 choices, {_WORDS}"),
    ),
    ("xstest", {}, _reasoned(450, 14, 250, "questions of 10 words", 512)),
    ("anthropic_red_team", {}, _reasoned(38_961, 25, 250, "first requests of 18 words", 512)),
    ("simple_safety_tests", {}, _reasoned(100, 18, 250, "requests of 13 words", 512)),
    ("harm_bench", {}, _reasoned(400, 80, 350, "requests of 15 words, a quarter of them with a text of 200", 512)),
    # The paper's data wrangling
    ("entity_matching", {"dataset": "Beer"}, _wrangling(91, 592)),
    ("entity_matching", {"dataset": "iTunes_Amazon"}, _wrangling(109, 529)),
    ("entity_data_imputation", {"dataset": "Restaurant"}, _wrangling(86, 123)),
    ("entity_data_imputation", {"dataset": "Buy"}, _wrangling(65, 488)),
    ("error_detection", {"dataset": "Hospital"}, _wrangling(200, 200)),
    # The paper's sub-scenarios
    ("wikifact", {"subject": "plaintiff"}, EntryLengths(288, 256, 0, 8, 8, "published", _PAPER)),
    ("wikifact", {"subject": "instance_of"}, EntryLengths(2592, 256, 0, 8, 8, "published", _PAPER)),
    ("summarization_xsum", {}, EntryLengths(1568, 1984, 0, 64, 64, "published", _PAPER)),
    ("synthetic_reasoning", {"mode": "pattern_match"}, _synthetic(231, 197, 6, 50)),
    ("synthetic_reasoning", {"mode": "induction"}, _synthetic(160, 142, 8, 50)),
    ("synthetic_reasoning", {"mode": "variable_substitution"}, _synthetic(217, 193, 8, 50)),
    ("synthetic_reasoning_natural", {"difficulty": "easy"}, _synthetic(389, 303, 6, 20)),
    ("synthetic_reasoning_natural", {"difficulty": "medium"}, _synthetic(382, 297, 5, 20)),
    ("synthetic_reasoning_natural", {"difficulty": "hard"}, _synthetic(382, 297, 5, 20)),
    # The other shipped entries whose data is made or was here
    ("dyck_language", {}, EntryLengths(500, 164, 95, 4, 5, "measured", _OWN)),
    ("simple_mcqa", {}, EntryLengths(79, 153, 136, 2, 5, "measured", _OWN)),
    ("simple_classification", {}, EntryLengths(79, 91, 85, 2, 5, "measured", _OWN)),
    ("simple_mcqa_scored", {}, EntryLengths(79, 89, 83, 1, 1, "measured", _OWN, requests=2, scored=True)),
    ("entity_matching", {"dataset": "Fodors_Zagats"}, EntryLengths(379, 832, 734, 2, 5, "measured", _OWN)),
    ("lambada", {"mode": "accuracy"}, EntryLengths(5153, 80, 1, 1, 1, "measured", _OWN)),
    ("lambada", {"mode": "perplexity"}, EntryLengths(5153, 82, 0, 1, 1, "measured", _OWN, scored=True)),
    ("wikitext", {}, EntryLengths(62, 1953, 0, 1, 1, "measured", _OWN, requests=173 / 62, scored=True)),
)
