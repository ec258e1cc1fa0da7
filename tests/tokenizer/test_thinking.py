"""Thinking: told from the answer, whatever the tokens; stop strings, budgets, and thinking without
an end.
"""

import ast
import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.request import (
    Completion,
    DrawnToken,
    GenerationRequest,
    ThinkingFormat,
    ThinkingMarks,
)
from flexgen_helm.scheduling.sequence import CompletionState
from flexgen_helm.tokenizer.thinking import is_unfinished, split_thinking
from flexgen_helm.tokenizer.token_bytes import helm_bytes, helm_text


def helms_parsers():
    """HELM's parsers of thinking, from the source of a module that needs a package which is not
    installed.
    """
    spec = find_spec("helm")
    source = (
        Path(next(iter(spec.submodule_search_locations or ()))) / "clients" / "together_client.py"
    )
    tree = ast.parse(source.read_text(encoding="utf-8"))
    tree.body = [
        part for part in tree.body if getattr(part, "name", "").startswith("_parse_thinking_")
    ]
    namespace = {"re": re, "Tuple": tuple}
    exec(compile(tree, str(source), "exec"), namespace)
    return {name: parse for name, parse in namespace.items() if name.startswith("_parse")}


PARSERS = helms_parsers()
EOS = 10**6
THOUGHT = "<think>\nThe user\nasks é👍.\n</think>\n\nParis.\nAnd so on"


def cut(text, borders):
    """The bytes of a text as tokens, cut anywhere, within characters too."""
    data = text.encode()
    cuts = sorted({0, len(data), *(border % (len(data) + 1) for border in borders)})
    return [data[start:end] for start, end in pairwise(cuts)]


def completion(pieces, reason="endoftext"):
    text = b"".join(pieces).decode(errors="replace")
    ids = tuple(range(len(pieces)))
    return Completion(
        text, tuple(map(helm_text, pieces)), ids, tuple(-1.0 - i for i in ids), reason
    )


def run(pieces, *, inside=False, stop=(), marks=ThinkingMarks()):
    """Draw the pieces, as far as nothing ends the completion and no token is forced."""
    request = GenerationRequest(
        prompt_token_ids=[1],
        max_tokens=10**4,
        stop=stop,
        thinking=ThinkingFormat(inside, marks=marks),
    )
    state = CompletionState(request, 0, pieces.__getitem__)
    for token in range(len(pieces)):
        if state.push(DrawnToken(token, -1.0), {EOS}):
            return state
    state.push(DrawnToken(EOS, -1.0), {EOS})
    return state


def reference(text, inside, stop):
    """The text up to its stop string, by one regular expression over the whole text."""
    begin = r"" if inside else r"\s*<think>"
    match = re.match(begin + r".*?</think>\s*", text, re.DOTALL)
    if match is None and (inside or re.match(r"\s*<think>", text)):
        return text
    start = match.end() if match else 0
    end = text.find(stop, start)
    return text if end < 0 else text[:end]


# Stop strings

borders = st.lists(st.integers(0, 10**6), max_size=40)


@pytest.mark.parametrize(
    "text, inside",
    [
        (THOUGHT, False),
        (THOUGHT.removeprefix("<think>\n"), True),
        ("\n" + THOUGHT, False),
        ("plain answer\nand more", False),
        ("\n\nplain", False),
        ("<thinking> is a word\nhere", False),
        ("\n<thi", False),
        ("<think>never\nends", False),
        ("no end\nhere", True),
        ("</think>\n \nanswer\n", True),
        ("</think>", True),
        ("<think></think>\n\n", False),
    ],
)
@settings(max_examples=25)
@given(borders=borders)
def test_stop_strings_count_in_the_answer_only(text, inside, borders):
    got = run(cut(text, borders), inside=inside, stop=("\n",)).result()
    want = reference(text, inside, "\n")
    assert got.text == want
    assert got.finish_reason == ("endoftext" if want == text else "stop")


def test_without_a_thinking_format_the_first_stop_string_ends_everything():
    request = GenerationRequest(prompt_token_ids=[1], max_tokens=99, stop=("\n",))
    pieces = cut(THOUGHT, list(range(99)))
    state = CompletionState(request, 0, pieces.__getitem__)
    assert any(state.push(DrawnToken(token, -1.0), {EOS}) for token in range(len(pieces)))
    assert state.result().text == "<think>"
    assert run(pieces, stop=("\n",)).result().text.endswith("Paris.")


# HELM's result


@pytest.mark.parametrize(
    "parse, text",
    [
        ("_parse_thinking_deepseek_r1", "<think>\nWhy.\n</think>\n\nParis."),
        ("_parse_thinking_deepseek_r1", "<think>\nWhy.\nBecause.\n</think>\nParis.\n\nYes."),
        ("_parse_thinking_qwen3", "<think>\n\n</think>\n\nParis."),
        ("_parse_thinking_qwen3", "<think>\nnever ends\n"),
        ("_parse_thinking_deepseek_r1", "<think>never"),
        ("_parse_thinking_glm_4_5", "\n<think>Why.</think>Paris."),
        ("_parse_thinking_glm_4_5", "\n<think>never"),
    ],
)
@settings(max_examples=25)
@given(borders=borders)
def test_parts_are_those_of_helms_parsers(parse, text, borders):
    thinking, answer = split_thinking(completion(cut(text, borders)), ThinkingFormat())
    assert (thinking, answer.text) == PARSERS[parse](text)


@given(borders=borders)
def test_tokens_and_log_probabilities_are_those_of_the_answer(borders):
    whole = completion(cut(THOUGHT, borders))
    thinking, answer = split_thinking(whole, ThinkingFormat())
    assert (thinking, answer.text) == ("The user\nasks é👍.", "Paris.\nAnd so on")
    assert b"".join(map(helm_bytes, answer.tokens)).decode() == answer.text
    kept = len(answer.tokens)
    assert 0 < kept == len(answer.token_ids) == len(answer.logprobs)
    assert (answer.token_ids, answer.logprobs) == (whole.token_ids[-kept:], whole.logprobs[-kept:])
    assert answer.tokens[1:] == whole.tokens[len(whole.tokens) - kept + 1 :]


@pytest.mark.parametrize(
    "text, inside, thinking, answer",
    [
        ("Why.\n</think>\n\nParis.", True, "Why.", "Paris."),
        ("<think>\nWhy.\n</think>\n\nParis.", True, "Why.", "Paris."),  # begins twice
        # the template does not say where it begins
        ("Why.\n</think>\n\nParis.", False, "Why.", "Paris."),
        ("still thinking", True, "still thinking", ""),
        ("<think>\nstill thinking", False, "still thinking", ""),
        ("Paris.", False, None, "Paris."),
        ("I <think> so", False, None, "I <think> so"),
        ("Why.\n</think>\n\n", True, "Why.", ""),
    ],
)
def test_where_thinking_begins_and_ends(text, inside, thinking, answer):
    got, rest = split_thinking(completion([text.encode()], "length"), ThinkingFormat(inside))
    assert (got, rest.text, rest.finish_reason) == (thinking, answer, "length")
    assert bool(rest.tokens) == bool(answer)


# Other marks

CHANNELS = ThinkingMarks("<|channel|>", "<|channel|>final<|message|>")
RESPONSES = ThinkingMarks(
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"
)
ANSWERS = ThinkingMarks("<think>", "</think>", "<answer>", "</answer>")


@pytest.mark.parametrize(
    "marks, inside, text, thinking, answer",
    [
        (CHANNELS, False, "<|channel|>analysis<|message|>Why\nso.<|end|>"
         "<|start|>assistant<|channel|>final<|message|>Paris.",
         "analysis<|message|>Why\nso.<|end|><|start|>assistant", "Paris."),
        (CHANNELS, False, "<|channel|>final<|message|>Paris.", "", "Paris."),
        (CHANNELS, False, "<|channel|>analysis<|message|>Why<|end|>"
         "<|start|>assistant<|channel|>final "
         "<|constrain|>json<|message|>{}", "analysis<|message|>Why<|end|>"
         "<|start|>assistant", "{}"),
        (CHANNELS, False, "<|channel|>final json<|message|>{}", "", "{}"),
        (CHANNELS, False, "<|channel|>finalists<|message|>{}", "finalists<|message|>{}", ""),
        (CHANNELS, False, "<|channel|>analysis<|message|>Why\nnot", "analysis<|message|>Why\nnot", ""),
        (RESPONSES, True, "Why\nso.<|END_THINKING|><|START_TEXT|>Paris.<|END_TEXT|>", "Why\nso.", "Paris."),
        (RESPONSES, False, "<|START_TEXT|>Paris.<|END_TEXT|>", None, "Paris."),
        (RESPONSES, False, "Paris.", None, "Paris."),
        (RESPONSES, True, "Why.<|END_THINKING|>Paris.", "Why.", "Paris."),
        (ANSWERS, False, "<think>\nWhy\nso.\n</think>\n<answer>\nParis.\n</answer>", "Why\nso.", "Paris."),
        (ANSWERS, False, "<think>Why.</think>\n\nParis: <answer>", "Why.", "Paris: <answer>"),
        (ThinkingMarks("[THINK]", "[/THINK]"), False, "[THINK]Why\nso.[/THINK]Paris.", "Why\nso.", "Paris."),
        (ThinkingMarks("<|channel>", "<channel|>"), False, "<|channel>thought\nWhy\n<channel|>Paris.",
         "thought\nWhy", "Paris."),
    ],
)  # fmt: skip
@settings(max_examples=25)
@given(borders=borders)
def test_other_marks_part_thinking_from_the_answer(marks, inside, text, thinking, answer, borders):
    """Whatever the tokens; and a newline that ends the answer counts behind the marks only."""
    thought_in = ThinkingFormat(inside, marks=marks)
    pieces = cut(text, borders)
    got, rest = split_thinking(completion(pieces), thought_in)
    assert (got, rest.text) == (thinking, answer)
    assert b"".join(map(helm_bytes, rest.tokens)).decode() == answer
    assert len(rest.tokens) == len(rest.token_ids) == len(rest.logprobs)
    assert is_unfinished(completion(pieces), thought_in) == (thinking is not None and not answer)
    stopped = run(
        cut(f"{text}\nMore", borders), inside=inside, stop=("\n", "."), marks=marks
    ).result()
    assert (
        split_thinking(completion([stopped.text.encode()]), thought_in)[1].text
        == answer.partition(".")[0]
    )


# The budget

END_IDS = (900, 901, 902)
VOCABULARY = {
    900: b"\n</",
    901: b"think>",
    902: b"\n\n",
    1: b"<think>",
    2: b"hm ",
    3: b"Paris",
    4: b"</think>",
}


def forced(tokens, budget, inside=False, max_tokens=50):
    """What is forced at each draw of a completion whose model would draw `tokens`."""
    assert b"".join(VOCABULARY[i] for i in END_IDS).decode() == "\n</think>\n\n"
    thinking = ThinkingFormat(inside, budget, END_IDS)
    request = GenerationRequest(
        prompt_token_ids=[1], max_tokens=max_tokens, thinking=thinking, temperature=1.0
    )
    state, seen = CompletionState(request, 0, VOCABULARY.__getitem__), []
    for token in tokens:
        params = state.next_sampling()
        assert state.next_sampling() == params  # a pass may be computed again
        seen.append(params.forced)
        if state.push(DrawnToken(token if params.forced is None else params.forced, -1.0), {EOS}):
            break
    return seen


def test_a_spent_budget_forces_the_end_of_thinking():
    no = None
    assert forced([1, 2, 2, 2, 2, 2, 2, 3], 2) == [no, no, no, 900, 901, 902, no, no]
    assert forced([2, 2, 2, 2, 2, 3], 2, inside=True) == [no, no, 900, 901, 902, no]
    assert forced([2, 2, 2, 2], 0, inside=True) == [900, 901, 902, no]
    assert forced([1, 2, 4, 3, 3, 3], 2) == [no] * 6  # ended by itself
    assert forced([3, 3, 3, 3], 0) == [no] * 4  # never thought
    # it counts in max_tokens
    assert forced([1, 2, 2, 2, 2, 2], 2, max_tokens=4) == [no, no, no, 900]


@given(st.text(), st.binary())
def test_helms_spelling_of_bytes_is_inverted(text, data):
    assert helm_bytes(helm_text(data)) == data or data.decode(errors="replace").startswith("bytes:")
    assert helm_bytes("bytes:\\xe2\\x82") == b"\xe2\x82"
