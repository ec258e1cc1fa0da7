"""What a sample of answers says of a suite, and bundles: what was written is read, and nothing else
is.
"""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import zstandard

from flexgen_helm.errors import FlexgenError, UsageError
from flexgen_helm.report import bundles
from flexgen_helm.report.bundles import BundledAnswer, SampleManifest, packed_bundle, read_bundle
from flexgen_helm.report.verification import (
    AnswerFile,
    RecordedAnswer,
    Source,
    compare_answers,
    draw,
    drawn_numbers,
    plain_result,
    sample_size,
    share_above,
    upper_bound,
)
from flexgen_helm.request import (
    Completion,
    Cost,
    GenerationRequest,
    GenerationResult,
    ThinkingFormat,
)
from flexgen_helm.response_cache import decode_result

REQUEST = GenerationRequest(
    prompt_token_ids=(1, 2, 3), max_tokens=4, temperature=0.5, top_p=0.9, seed=1 << 62, stop=("\n",), n=2,
    echo_logprobs=True, thinking=ThinkingFormat(True, 7, (5,)),
)  # fmt: skip
RESULT = GenerationResult(
    (Completion("é\ud7ff", ("bytes:\\xc3",), (7,), (-0.1,), "stop"),),
    (1, 2, 3),
    (None, -2.5, -3.0),
    None,
    Cost(5, 2.0),
)
DRAWN = [
    BundledAnswer(
        0, drawn_numbers(0, 1000, 1)[0], "run, instance id1", [REQUEST], [plain_result(RESULT)]
    )
]
MANIFEST = SampleManifest(
    "s", 1000, 0, [Source("m", "fp16", "f", None, {"name": "cpu"}, None, None, None)]
)


@pytest.mark.parametrize(
    "rate, population, drawn", [(0.02, 5000, 200), (0.3, 400, 20), (0.001, 20000, 1000)]
)
def test_the_bound_holds_in_95_of_100_samples(rate, population, drawn):
    draw = np.random.default_rng(0)
    differing = round(rate * population)
    found = draw.hypergeometric(differing, population - differing, drawn, size=2000)
    bounds = {count: upper_bound(count, drawn, population) for count in set(found.tolist())}
    held = np.mean([bounds[count] >= rate for count in found.tolist()])
    assert (
        held >= 0.95 - 2 * (0.05 * 0.95 / 2000) ** 0.5
        and min(bounds.values()) < 4 * rate + 3 / drawn
    )


def test_bounds_and_shares_by_hand():
    assert upper_bound(0, 200, 19_872) == pytest.approx(1 - 0.05 ** (1 / 200))
    assert (
        share_above(upper_bound(0, 200, 19_872)) == "1.5 %"
        and share_above(0.000_150_1) == "0.016 %"
    )
    assert (
        upper_bound(3, 30, 30) == 0.1
        and upper_bound(5, 5, 30) == 1.0
        and share_above(1.0) == "100 %"
    )


@pytest.mark.parametrize(
    "asked, population, size",
    [(None, 19_872, 199), (None, 1000, 20), (None, 7, 7), ("1%", 1000, 10), ("100%", 9, 9), ("0.01%", 100, 1),
     ("3", 9, 3), ("30", 9, 9)],
)  # fmt: skip
def test_sizes_of_samples(asked, population, size):
    assert sample_size(asked, population) == size


@pytest.mark.parametrize("asked", ["0", "-1", "x", "101%", "nan%", "1.5", "%", "inf%"])
def test_no_size_of_a_sample(asked):
    with pytest.raises(UsageError, match="--sample is"):
        sample_size(asked, 100)


ANSWER = {"text": "a", "end": "stop", "logprobs": [-0.1, -2.0], "more": [[-4.0, True]]}


@pytest.mark.parametrize(
    "change, where",
    [({}, None), ({"text": "b"}, "text"), ({"end": None}, "end"), ({"logprobs": [-0.1001, -2.0]}, "logprobs[0]"),
     ({"logprobs": [-0.1, -2.000001]}, None), ({"logprobs": []}, "logprobs"),
     ({"logprobs": [-0.1]}, "logprobs[1]"), ({"logprobs": [float("nan"), -2.0]}, "logprobs[0]"),
     ({"logprobs": -3.0}, "logprobs"), ({"new": 1}, "new"),
     ({"more": [[-4.0, False]]}, "more[0][1]"), ({"more": [[-4.00001, True]]}, None),
     ({"more": [["x", True]]}, "more[0][0]")],
)  # fmt: skip
def test_what_is_equal(change, where):
    recorded = {**ANSWER, **change}
    found = compare_answers(recorded, ANSWER, 1.5e-5)[0]
    assert [name for name, _, _ in found][:1] == ([where] if where else [])
    assert bool(compare_answers(recorded, ANSWER, 0.0)[0]) is bool(change)
    assert bool(compare_answers(ANSWER, recorded, 0.0)[0]) is bool(change)
    assert compare_answers([ANSWER, ANSWER], [ANSWER], 1.0)[0]


def test_sums_differ_by_parts_of_their_value():
    assert compare_answers([-50.0], [-50.004], 1e-4, has_sums=True) == ([], pytest.approx(8e-5))
    assert (
        compare_answers([-50.0], [-50.006], 1e-4, has_sums=True)[0]
        and compare_answers([-50.0], [-50.004], 1e-4)[0]
    )
    assert compare_answers([-0.5], [-0.50006], 1e-4, has_sums=True)[1] == pytest.approx(6e-5)


def test_a_bundle_is_read_as_it_was_written(tmp_path):
    (tmp_path / "b.zst").write_bytes(packed_bundle(MANIFEST, DRAWN))
    manifest, (answer,) = read_bundle(tmp_path / "b.zst")
    assert manifest == MANIFEST
    assert json.dumps(asdict(answer)) == json.dumps(asdict(DRAWN[0]))
    assert decode_result(json.dumps(answer.results[0])) == replace(RESULT, cost=Cost())
    assert [*map(sorted, map(json.loads, lines(tmp_path / "b.zst")))] == [  # as others read it
        ["format", "population", "seed", "sources", "suite"], ["name", "number", "requests", "results", "source"]
    ]  # fmt: skip


def lines(path):
    """The manifest, and the answers."""
    return zstandard.ZstdDecompressor().decompress(path.read_bytes()).split(b"\n")


HOSTILE = {
    "nothing": b"",
    "no Zstandard": b"no zstandard",
    "no content": zstandard.compress(b""),
    "an archive with a path": zstandard.compress(b"/etc/passwd".ljust(512, b"\0")),
    "a manifest that is cut": zstandard.compress(b'{"suite": "s"'),
    "no answers of a list": zstandard.compress(b"[]\n[]"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_a_sentence(tmp_path, name):
    (tmp_path / "b.zst").write_bytes(HOSTILE[name])
    refuse(tmp_path / "b.zst")


def refuse(path):
    with pytest.raises(FlexgenError) as refusal:
        read_bundle(path)
    assert (
        "is no bundle as verify writes it: " in str(refusal.value) and len(str(refusal.value)) < 600
    )


def test_a_bomb_is_not_decompressed(tmp_path):
    compressor = zstandard.ZstdCompressor().compressobj()
    content = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(64)) + compressor.flush()
    (tmp_path / "b.zst").write_bytes(content)
    assert len(content) < 1 << 20
    used = peak_bytes(lambda: refuse(tmp_path / "b.zst"))
    assert used < 300 << 20


def peak_bytes(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "change",
    [lambda whole: whole[:-1], lambda whole: whole[:40], lambda whole: whole + b"a", lambda whole: whole + whole,
     lambda whole: whole[:90] + bytes([whole[90] ^ 4]) + whole[91:]],
)  # fmt: skip
def test_bytes_that_are_lost_changed_or_behind_the_end(tmp_path, change):
    path = tmp_path / "b.zst"
    path.write_bytes(packed_bundle(MANIFEST, DRAWN))
    path.write_bytes(change(path.read_bytes()))
    refuse(path)


def test_a_name_twice_is_refused():
    twice = AnswerFile(
        Path("b"), "verify", vars(MANIFEST.sources[0]), [RecordedAnswer("x", [], print)].copy
    )
    with pytest.raises(FlexgenError, match="1 answers are there more than once: 'x'"):
        draw([twice, twice], None, 0)


CHANGES = {
    "another format": (b'"format": 2', b'"format": 1', None),
    "a list": (b"{", b"[{", None),
    "a wrong type": (b'"population": 1000', b'"population": "1000"', None),
    "a boolean": (b'"seed": 0', b'"seed": false', None),
    "a missing key": (b'"seed": 0,', b"", None),
    "more answers than the suite": (b'"population": 1000', b'"population": 0', None),
    "another population": (b'"population": 1000', b'"population": 10000', None),
    "another seed": (b'"seed": 0', b'"seed": 1', None),
    "escapes": (b'"suite": "s"', b'"suite": "\\u001b[31m"', None),
    "a model that is a path": (b'"model": "m"', b'"model": ["/etc"]', None),
    "NaN": (b"-0.1", b"NaN", True), "infinity": (b"-0.1", b"-1e999", True),
    "a huge number": (b'"max_tokens": 4', b'"max_tokens": 1' + b"0" * 5000, True),
    "a text for a token": (b"[1, 2, 3]", b'["1"]', True),
    "a deep nest": (b"[1, 2, 3]", b"[" * 100_000, True), "a text": (b"[1, 2, 3]", b"null", True),
    "too many completions": (b'"n": 2', b'"n": 100000', True),
    "no such source": (b'"source": 0', b'"source": -1', True),
    "no result": (b'"results": [{', b'"results": [], "x": [{', True),
    "no request": (b'"requests": [{', b'"x": [{', True),
    "an unknown key of a result": (b'"cost"', b'"error": 1, "cost"', True),
    "fewer log-probabilities "
    "than tokens": (b"[-0.1]", b"[]", True), "no UTF-8": (b"run, ", b"\xff", True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_content_of_another_form_ends_in_a_sentence(tmp_path, name):
    old, new, is_line = CHANGES[name]
    path = tmp_path / "b.zst"
    path.write_bytes(packed_bundle(MANIFEST, DRAWN))
    parts = lines(path)
    assert old in parts[bool(is_line)]
    parts[bool(is_line)] = parts[bool(is_line)].replace(old, new)
    path.write_bytes(zstandard.compress(b"\n".join(parts)))
    refuse(path)


def test_what_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "_MAX_BYTES", 100)
    with pytest.raises(FlexgenError, match="the bundle would have"):
        (tmp_path / "b.zst").write_bytes(packed_bundle(MANIFEST, DRAWN))
