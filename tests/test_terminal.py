"""Sentences and tables at the widths of terminals: no line is too long, no word is cut."""

import io

import pytest

from flexgen_helm.terminal import fill, is_terminal, table_text

HEADINGS = ["run entry", "n", "fp16", "95 % interval", "verdict"]
ROWS = [
    ["mmlu:subject=abstract_algebra,method=multiple_choice_joint", "", "", "", ""],
    [
        "  exact_match, quasi_exact_match",
        "1,000",
        "0.5400",
        "-10.00 … +20.00",
        "not decided: about 2,500 would decide",
    ],
]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_and_no_word_is_cut(width):
    drawn = table_text(HEADINGS, ROWS, width, ("n",))
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= width
    words = {word for line in lines for word in line.split()}
    whole = {
        "subject=abstract_algebra,",
        "method=multiple_choice_joint",
        "exact_match,",
        "quasi_exact_match",
        "0.5400",
    }
    joined = {
        "mmlu:subject=abstract_algebra,",
        "mmlu:subject=abstract_algebra,method=multiple_choice_joint",
    }
    assert all(word in words or any(word in longer for longer in joined & words) for word in whole)
    assert lines[1] == "─" * len(lines[1])
    assert "0.5400  -10.00 … +20.00" in drawn, "short cells stay on one line"


def test_columns_that_have_no_room_are_left_out_and_named():
    assert "No room" not in table_text(HEADINGS, ROWS, 80)
    narrow = table_text(HEADINGS, ROWS, 60, ("n",))
    assert narrow.endswith("(No room for: n, verdict.)") and "0.5400  -10.00 … +20.00" in narrow
    assert table_text(HEADINGS, ROWS, 40).endswith("  verdict.)"), "the last columns go"


def test_numbers_are_aligned_to_the_right():
    rows = [["a", "1", "x"], ["b", "1,000", "xyz"], ["c", "", ""]]
    assert table_text(["name", "count", "word"], rows, 80).splitlines()[2:] == [
        "a         1  x",
        "b     1,000  xyz",
        "c",
    ]


def test_sentences_break_at_words_and_commands_stay():
    command = "  flexgen-helm run -r " + "simple_mcqa:model=flexgen/tiny " * 4
    text = f"prompts of tiny go through its chat template; go on with:\n{command}"
    *lines, last = fill(text, 30).splitlines()
    assert last == command and " ".join(line.strip() for line in lines) == text.splitlines()[0]
    assert (
        max(map(len, lines)) <= 30
        and fill("a/path/of/forty/characters/without/a/blank", 20).count("\n") == 0
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "kind, expected", [("xterm-256color", True), ("dumb", False), ("unknown", False)]
)
def test_a_dumb_terminal_is_read_like_a_pipe(kind, expected, monkeypatch):
    monkeypatch.setenv("TERM", kind)
    assert is_terminal(Terminal()) == expected and not is_terminal(io.StringIO())
