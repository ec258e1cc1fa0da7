"""The stop matcher against a direct reference that decodes the whole text after every token."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer.stop_strings import CompletionText, StopMatcher

# Few letters, so that stop strings occur and overlap; characters of one to four bytes; a joiner
# sequence.
ALPHABET = "ab\n é€👍"


def feed(pieces, stops):
    """Push the pieces as tokens 0, 1, … until a stop; return the text, how many were pushed, and
    whether it stopped.
    """
    matcher = StopMatcher(pieces.__getitem__, stops)
    for pushed, token_id in enumerate(range(len(pieces)), start=1):
        if matcher.push(token_id):
            return matcher.result(), pushed, True
    return matcher.result(), len(pieces), False


def reference(pieces, stops):
    """Return (text, tokens kept, tokens pushed), found the slow way on decoded text."""
    for pushed in range(1, len(pieces) + 1):
        text = b"".join(pieces[:pushed]).decode("utf-8", errors="replace")
        hits = [text.find(stop) for stop in stops if stop in text]
        if hits:
            text = text[: min(hits)]
            kept = 0
            # The last kept token is the first one with which the text in front of the stop is
            # complete.
            while b"".join(pieces[:kept]).decode("utf-8", errors="ignore").find(text) != 0:
                kept += 1
            return text, kept, pushed
    return b"".join(pieces).decode("utf-8", errors="replace"), len(pieces), len(pieces)


@st.composite
def split_texts(draw):
    """A text's bytes cut anywhere, also inside characters."""
    data = draw(st.text(ALPHABET, max_size=30)).encode("utf-8")
    cuts = draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=20))
    borders = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(borders) if b > a]


@given(split_texts(), st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4))
def test_equals_the_slow_reference(pieces, stops):
    kept, pushed, stopped = feed(pieces, stops)
    text, n_kept, n_pushed = reference(pieces, stops)
    assert (kept.text, pushed) == (text, n_pushed)
    assert kept.token_ids == tuple(range(n_kept))
    assert len(kept.tokens) == n_kept
    assert stopped == any(
        stop in b"".join(pieces[:pushed]).decode("utf-8", "replace") for stop in stops
    )


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_any_bytes_decode_as_a_whole(pieces):
    kept, _, _ = feed(pieces, [])
    assert kept.text == b"".join(pieces).decode("utf-8", errors="replace")
    assert len(kept.token_ids) == len(pieces)


def test_tokens_without_text_stay_in_front_of_the_stop_only():
    kept, _, _ = feed([b"", b"a", b"", b"b", b"", b"\n"], ["\n"])
    assert kept.token_ids == (0, 1, 2, 3)
    kept, _, _ = feed([b"a", b""], ["\n"])
    assert kept.token_ids == (0, 1)


def test_result_may_be_asked_for_at_any_time():
    matcher = StopMatcher([b"a", b"b\n"].__getitem__, ["\n"])
    assert not matcher.push(0)
    assert matcher.result() == matcher.result() == CompletionText("a", ("a",), (0,))
    assert matcher.push(1)
    assert matcher.result().text == "ab"
    with pytest.raises(RuntimeError, match="stop string"):
        matcher.push(0)


@pytest.mark.parametrize("stop", ["", "a\ud800"])
def test_unusable_stop_strings_are_refused(stop):
    with pytest.raises(RequestError):
        StopMatcher([b"a"].__getitem__, ["ok", stop])
