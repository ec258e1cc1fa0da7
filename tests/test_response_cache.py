"""The response cache: round trips, durability among processes, and rows or files that are not
ours.
"""

from __future__ import annotations

import pickle
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm import response_cache
from flexgen_helm.errors import RequestError
from flexgen_helm.progress import observed_by
from flexgen_helm.request import Completion, Cost, DrawnToken, GenerationResult
from flexgen_helm.response_cache import (
    ResponseCache,
    ResponseCacheError,
    ResponseWriter,
    decode_result,
    encode_result,
    response_cache_path,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(0, 2**40)


@st.composite
def completions(draw):
    tokens = draw(st.lists(st.tuples(st.text(), whole, finite), max_size=5))
    texts, ids, logprobs = zip(*tokens) if tokens else ((), (), ())
    return Completion(
        draw(st.text()),
        texts,
        ids,
        logprobs,
        draw(st.sampled_from(["length", "stop", "endoftext"])),
    )


costs = st.builds(
    Cost, whole, finite, whole, finite, finite, finite, finite, finite, st.integers(1, 99)
)
results = st.builds(
    GenerationResult,
    completions=st.lists(completions(), max_size=3).map(tuple),
    prompt_token_ids=st.lists(whole, max_size=5).map(tuple),
    prompt_logprobs=st.none() | st.lists(st.none() | finite, max_size=5).map(tuple),
    cost=costs,
)
SOME = GenerationResult(
    (Completion("a", ("a",), (1,), (-0.5,), "stop"),), (3, 4), (None, -1.25), None, Cost(2)
)


@settings(max_examples=60)
@given(results)
def test_round_trip_is_exact(result):
    assert decode_result(encode_result(result)) == result


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_and_errors_are_refused(value):
    with pytest.raises(ValueError):
        encode_result(GenerationResult((Completion("a", ("a",), (1,), (value,), "stop"),)))
    with pytest.raises(ValueError):
        encode_result(GenerationResult(error=RequestError("no")))


def test_results_survive_closing(tmp_path):
    many = {f"k{i}": SOME for i in range(1201)}  # more than one query's worth of keys
    with closing(ResponseCache(tmp_path / "a" / "j.sqlite")) as cache:
        cache.put_many(many)
    with closing(ResponseCache(tmp_path / "a" / "j.sqlite")) as cache:
        assert cache.get_many([*many, "unknown"]) == many
        assert cache.get_many([]) == {}


class Bomb:
    def __reduce__(self):
        return (open, ("/nonexistent/executed", "w"))  # type: ignore[return-value]


def test_foreign_rows_are_ignored_and_never_executed(tmp_path):
    path = tmp_path / "j.sqlite"
    planted: dict[str, object] = {
        "pickle": pickle.dumps(Bomb()),
        "nan": encode_result(SOME).replace("-1.25", "NaN"),
        "list": "[]",
        "truncated": encode_result(SOME)[:-5],
        "reason": encode_result(SOME).replace("stop", "because"),
        "type": encode_result(SOME).replace("[3,4]", '["3",4]'),
    }
    with closing(ResponseCache(path)) as cache:
        cache.put_many({"good": SOME})
    with sqlite3.connect(path) as connection:
        connection.executemany("INSERT INTO answers VALUES (?, ?)", list(planted.items()))
    with closing(ResponseCache(path)) as cache:
        assert cache.get_many(["good", *planted]) == {"good": SOME}


def test_a_file_that_is_no_response_cache_is_named(tmp_path):
    path = tmp_path / "j.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(
        ResponseCacheError,
        match=(r"j\.sqlite is damaged or not a response cache.*move the file away"),
    ):
        ResponseCache(path)


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "j.sqlite"
    ResponseCache(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '99'")
    with pytest.raises(ResponseCacheError, match="format '99'"):
        ResponseCache(path)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResponseCacheError, match="cannot be created"):
        ResponseCache(tmp_path / "file" / "j.sqlite")


def test_one_file_a_fingerprint(tmp_path):
    names = {
        response_cache_path(tmp_path, name).name for name in ("a", "b", "../../a", "x" * 500, "é")
    }
    assert len(names) == 5
    assert all(
        response_cache_path(tmp_path, name).parent == tmp_path / "journal"
        for name in ("a", "../../a")
    )


WRITER = """
import sys
from pathlib import Path
from flexgen_helm.request import Completion, Cost, GenerationResult
from flexgen_helm.response_cache import ResponseCache
who, cache = int(sys.argv[2]), ResponseCache(Path(sys.argv[1]))
for start in range(0, 500, 25):
    cache.put_many({f"{who}-{i}": GenerationResult(cost=Cost(who, i)) for i in range(start, start + 25)})
"""


def test_four_processes_lose_nothing(tmp_path):
    path = tmp_path / "j.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(who)]) for who in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    with closing(ResponseCache(path)) as cache:
        found = cache.get_many([f"{who}-{i}" for who in range(4) for i in range(500)])
    assert len(found) == 2000
    assert all(found[f"{who}-{i}"].cost == Cost(who, i) for who in range(4) for i in range(500))


def test_a_result_is_stored_soon_although_no_other_one_follows(tmp_path, monkeypatch):
    result = GenerationResult((Completion("a", ("a",), (1,), (-0.5,), "stop"),))

    def is_stored(path, wait_s):
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            with closing(ResponseCache(path)) as cache:
                if cache.get_many(["k"]) == {"k": result}:
                    return True
            time.sleep(0.02)
        return False

    for name, seconds, is_soon in (("soon", 0.1, True), ("late", 3600.0, False)):
        monkeypatch.setattr(response_cache, "MAX_PENDING_S", seconds)
        writer = ResponseWriter(tmp_path / name, "some")
        writer.add("k", result)
        assert is_stored(tmp_path / name, 20 if is_soon else 0.5) == is_soon
        writer.close()
        assert is_stored(tmp_path / name, 20)


def test_rows_say_what_is_greedy_only_where_it_was_asked():
    scored = GenerationResult((), (5, 6), (None, -1.0), prompt_greedy=(None, True))
    assert decode_result(encode_result(scored)) == scored
    plain = GenerationResult((), (5, 6), (None, -1.0))
    assert "greedy" not in encode_result(plain) and decode_result(encode_result(plain)) == plain


TOKENS = [
    DrawnToken(3, -0.1, ((3, -0.1), (5, -2.5))),
    DrawnToken(4, -1 / 3, ((4, -1 / 3), (3, -1.5))),
]


def test_tokens_are_kept_until_their_answer_is(tmp_path):
    path = tmp_path / "j.sqlite"
    with closing(ResponseCache(path)) as cache:
        cache.put_many({}, {"k": {0: (0, TOKENS[:1]), 2: (0, TOKENS)}, "other": {0: (0, TOKENS)}})
        cache.put_many({}, {"k": {0: (1, TOKENS[1:])}})
    with closing(ResponseCache(path)) as cache:
        assert cache.take_drawn(["k", "unknown"]) == {"k": [TOKENS, [], TOKENS]}
        cache.put_many({}, {"k": {0: (2, TOKENS)}})
    with closing(ResponseCache(path)) as cache:
        assert cache.take_drawn(["k"]) == {"k": [TOKENS * 2, [], TOKENS]}
        cache.put_many({"k": SOME})
        assert cache.take_drawn(["k", "other"]) == {"other": [TOKENS]}


def test_tokens_of_two_writers_do_not_mix(tmp_path):
    """Each draws the same answer; near-ties may be drawn otherwise, so what follows one's tokens is
    of no use behind the other's.
    """
    path, other = tmp_path / "j.sqlite", [DrawnToken(9, -1.0)]
    with closing(ResponseCache(path)) as first, closing(ResponseCache(path)) as second:
        first.put_many({}, {"k": {0: (0, TOKENS)}})
        second.put_many({}, {"k": {0: (0, other)}})
        first.put_many({}, {"k": {0: (2, TOKENS)}})
        assert second.take_drawn(["k"]) == {"k": [TOKENS * 2]}
        first.put_many({}, {"k": {0: (4, other)}})  # behind what the second one has taken
        second.put_many({}, {"k": {0: (4, TOKENS)}})
    with closing(ResponseCache(path)) as third:
        assert third.take_drawn(["k"]) == {"k": [TOKENS * 3]}


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM drawn WHERE step = 2",
        "UPDATE drawn SET value = substr(value, 1, 9) WHERE step = 2",
        "UPDATE drawn SET value = '[[\"3\",-0.1,[]]]' WHERE step = 2",
        "UPDATE drawn SET value = '[[3,NaN,[]]]' WHERE step = 2",
        "UPDATE drawn SET step = 3 WHERE step = 2",
    ],
)
def test_tokens_end_where_a_part_is_missing_or_damaged(tmp_path, change):
    path = tmp_path / "j.sqlite"
    with closing(ResponseCache(path)) as cache:
        for step in (0, 2, 4):
            cache.put_many({}, {"k": {0: (step, TOKENS), 1: (step, TOKENS)}})
    with sqlite3.connect(path) as connection:
        connection.execute(f"{change} AND completion = 0")
    with closing(ResponseCache(path)) as cache:
        assert cache.take_drawn(["k"]) == {"k": [TOKENS, TOKENS * 3]}


def test_a_file_that_ends_in_the_middle_of_a_transaction_has_the_tokens_before_it(tmp_path):
    """A power cut: the file is copied with SQLite's journal while a transaction is being
    written.
    """
    path, copy = tmp_path / "j.sqlite", tmp_path / "copy.sqlite"
    with closing(ResponseCache(path)) as cache:
        cache.put_many({}, {"k": {0: (0, TOKENS)}})
        # pages go to the file before the transaction ends
        cache._connection.execute("PRAGMA cache_size = 1")
        cache._connection.execute("BEGIN IMMEDIATE")
        rows = [("k", cache._writer, 0, 2 + 2 * i, "x" * 4000) for i in range(50)]
        cache._connection.executemany("INSERT INTO drawn VALUES (?, ?, ?, ?, ?)", rows)
        assert path.stat().st_size > 100_000
        for name in ("", "-journal"):
            copy.with_name(copy.name + name).write_bytes(
                path.with_name(path.name + name).read_bytes()
            )
    with closing(ResponseCache(copy)) as cache:
        assert cache.take_drawn(["k"]) == {"k": [TOKENS]}


def test_tokens_that_are_drawn_again_replace_the_first_ones(tmp_path):
    """Another worker may draw others at a near-tie."""
    with closing(ResponseWriter(tmp_path / "j.sqlite", "some")) as writer:
        for step, token in enumerate(TOKENS * 2):
            writer.add_drawn("k", 0, step, token)
            writer._flush()
        for step, token in enumerate(TOKENS[::-1]):
            writer.add_drawn("k", 0, step, token)
    with closing(ResponseCache(tmp_path / "j.sqlite")) as cache:
        assert cache.take_drawn(["k"]) == {"k": [TOKENS[::-1]]}


@pytest.mark.parametrize("completion", ["'0'", "'many'", "-1", "1000000000000", "NULL"])
def test_a_planted_completion_is_ignored(tmp_path, completion):
    path = tmp_path / "j.sqlite"
    with closing(ResponseCache(path)) as cache:
        cache.put_many({}, {"k": {0: (0, TOKENS)}})
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (key, writer, completion, step, value)")
        connection.execute(
            f"INSERT INTO other SELECT key, 'w', {completion}, step, value FROM drawn"
        )
        connection.execute("INSERT INTO other SELECT * FROM drawn")
        connection.execute("DROP TABLE drawn")
        connection.execute("ALTER TABLE other RENAME TO drawn")
    with closing(ResponseCache(path)) as cache:
        assert cache.take_drawn(["k"]) == {"k": [TOKENS]}


def test_tokens_are_written_soon_and_those_of_an_answer_never(tmp_path, monkeypatch):
    monkeypatch.setattr(response_cache, "KEEP_EVERY_S", 0.1)
    with closing(ResponseWriter(tmp_path / "j.sqlite", "some")) as writer:
        for step, token in enumerate(TOKENS):
            writer.add_drawn("k", 0, step, token)
            writer.add_drawn("done", 0, step, token)
        writer.add("done", SOME)
        deadline = time.monotonic() + 20
        while not (found := stored_tokens(tmp_path / "j.sqlite")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert found == {"k"}


def stored_tokens(path):
    with closing(sqlite3.connect(path)) as connection:
        return {key for (key,) in connection.execute("SELECT key FROM drawn")}


def test_a_full_disk_is_told_once_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(response_cache, "KEEP_EVERY_S", 0.01)
    told = []
    with (
        observed_by(lambda event: told.append(event.text)),
        closing(ResponseWriter(tmp_path / "j.sqlite", "")) as writer,
    ):
        size = writer._cache._connection.execute
        size("PRAGMA max_page_count = 8")
        for step in range(20_000):
            waits_s = writer.add_drawn("k", 0, step, TOKENS[0])
            if step % 2000 == 1:
                writer._flush()
        assert waits_s > 0.01  # the panel says so
        (text,) = told
        assert "not stored for a later run" in text and "j.sqlite" in text and "full" in text
        size("PRAGMA max_page_count = 1000000")
        writer._flush()
        assert told[1:] == ["results are stored again"]
    with closing(ResponseCache(tmp_path / "j.sqlite")) as cache:
        assert len(cache.take_drawn(["k"])["k"][0]) == 20_000
