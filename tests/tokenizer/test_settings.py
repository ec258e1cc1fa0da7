"""`tokenizer.json` files of drawn settings: ids of the `tokenizers` library, bytes of the text, or
refused by name.
"""

import json
from random import Random

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.tokenizer.token_bytes import byte_alphabet, helm_bytes
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers_by_family import BYTE_MERGES, MARK_CHARACTERS, MARK_MERGES, begin_with

SPECIAL = ("<unk>", "<s>", "</s>", "[gMASK]")
ADDED = ("<tool>", "<x▁y>", "<A b>", "é", "the")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "", " ", "the word", " the  cat's\n\n", "Hello HE'S 1998!!", "世界 👍 é e\u0301", "<unk> 0x41",
    "<s>the</s>", "a<tool> b", "a <tool>b <x▁y> c", "x<A b>the, thee ½ ① ﬁ", "<s> <s>word",
    "[gMASK]<s>the", "\t(the)\r\n...",
]  # fmt: skip


def draw(random):
    """Return a tokenizer, whether it loses a part of a text, whether it adds spaces, and what is to
    be refused.
    """

    def one(*values):
        return random.choice(values)

    kind = one("bytes", "metaspace", "replace")
    refused = ""
    is_bytes, has_bytes = kind == "bytes", one(True, False)
    pieces = sorted(byte_alphabet()) if is_bytes else [*MARK_CHARACTERS, *BYTES * has_bytes]
    merges = BYTE_MERGES if is_bytes else MARK_MERGES
    vocab = {
        piece: i
        for i, piece in enumerate(dict.fromkeys([*SPECIAL, *pieces, *map("".join, merges)]))
    }
    if random.random() < 0.6:
        affix = one(*[{}] * 8, {"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"})
        refused = next(iter(affix), "")
        model = models.BPE(
            vocab=vocab | {f"##{piece}": len(vocab) + i for i, piece in enumerate(vocab)}
            if refused
            else vocab,
            merges=[] if refused else merges,
            dropout=one(None, 0.0, 0.3, 0.9),
            unk_token=one(None, "<unk>"),
            fuse_unk=one(True, False),
            byte_fallback=has_bytes and not is_bytes,
            ignore_merges=one(True, False),
            **affix,
        )
    else:
        scores = [(piece, -float(random.randrange(1, 50))) for piece in vocab]
        model = models.Unigram(scores, unk_id=0, byte_fallback=has_bytes and not is_bytes)
    backend = Backend(model)

    steps = one(*[[]] * 4, [normalizers.NFC()], [normalizers.NFKC(), normalizers.Lowercase()])
    is_lossy = bool(steps) or not (is_bytes or has_bytes)
    splits = one(
        [], [pre_tokenizers.Digits(individual_digits=True)], [pre_tokenizers.Punctuation()]
    )
    prefix = one("always", "first", "never", "never")
    adds_spaces = prefix != "never"
    if kind == "bytes":
        splits.append(
            pre_tokenizers.ByteLevel(add_prefix_space=adds_spaces, use_regex=one(True, False))
        )
        joins = [decoders.ByteLevel()]
    elif kind == "metaspace":
        splits.append(pre_tokenizers.Metaspace("▁", prefix, split=one(True, False)))
        joins = [decoders.ByteFallback()] * has_bytes + [decoders.Metaspace("▁", prefix)]
    else:
        steps = [*steps, *[normalizers.Prepend("▁")] * (adds_spaces), normalizers.Replace(" ", "▁")]
        joins = [
            decoders.Replace("▁", " "),
            *[decoders.ByteFallback()] * has_bytes,
            decoders.Fuse(),
        ]
    if not refused and random.random() < 0.2:
        refused, odd = one(
            ("Replace", decoders.Replace(Regex("▁"), "_")),
            ("WordPiece", decoders.WordPiece()),
            ("CTC", decoders.CTC()),
            ("'_'", decoders.Metaspace("_")),
        )
        joins.append(odd)
    backend.normalizer = normalizers.Sequence(steps) if steps else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits) if splits else None
    backend.decoder = decoders.Sequence(joins) if len(joins) > 1 else joins[0]

    named = [(token, vocab[token]) for token in SPECIAL]
    backend.post_processor = one(
        None,
        begin_with("<s>", vocab["<s>"]),
        processors.TemplateProcessing(single="[gMASK] <s> $A", special_tokens=named),
        processors.TemplateProcessing(single="<s> $A </s>", special_tokens=named),
        processors.TemplateProcessing(single="$A </s>", special_tokens=named),
        processors.RobertaProcessing(
            ("</s>", vocab["</s>"]), ("<s>", vocab["<s>"]), add_prefix_space=False
        ),
        processors.BertProcessing(("</s>", vocab["</s>"]), ("<s>", vocab["<s>"])),
        processors.ByteLevel(trim_offsets=True),
        processors.Sequence([processors.ByteLevel(), begin_with("<s>", vocab["<s>"])]),
    )
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    for token in random.sample(ADDED, len(ADDED)):
        flags = {
            name: random.random() < 0.1
            for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        is_lossy |= flags["lstrip"] or flags["rstrip"] or (flags["normalized"] and "▁" in token)
        backend.add_tokens([AddedToken(token, **flags)])
    if one(True, False):
        backend.enable_truncation(3)
        backend.enable_padding(length=20, pad_id=0, pad_token="<unk>")
    return backend, is_lossy, adds_spaces, refused


def encoded(backend, text):
    """Return the library's ids with what it puts in front, which a text that begins so does not get
    again.
    """
    plain, ids = backend.encode(text, add_special_tokens=False).ids, backend.encode(text).ids
    inside = backend.encode("word", add_special_tokens=False).ids
    around = backend.encode("word").ids
    begin = next(at for at in range(len(around)) if around[at : at + len(inside)] == inside)
    return plain if plain and plain[:1] == around[:begin][:1] else ids[: begin + len(plain)]


def test_drawn_settings(tmp_path):
    num_exact = num_refused = 0
    for number in range(300):
        random = Random(number)
        backend, is_lossy, adds_spaces, refused = draw(random)
        folder = tmp_path / str(number)
        folder.mkdir()
        backend.save(str(folder / "tokenizer.json"))
        if refused:
            with pytest.raises(UnsupportedArchitectureError, match=refused):
                Tokenizer.from_path(folder)
            num_refused += 1
            continue
        state = json.loads(backend.to_str())
        state["model"].pop("dropout", None)
        reference = Backend.from_str(json.dumps(state | {"truncation": None, "padding": None}))
        tokenizer = Tokenizer.from_path(folder)
        assert tokenizer is not None
        for text in TEXTS:
            assert tokenizer.encode(text) == encoded(reference, text), text
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids == reference.encode(text, add_special_tokens=False).ids, text
            if not is_lossy:
                joined = b"".join(map(helm_bytes, tokenizer.token_texts(ids))).decode()
                assert tokenizer.decode(ids) == joined
                assert (
                    joined == text
                    or adds_spaces
                    and joined.replace(" ", "") == text.replace(" ", "")
                ), text
                num_exact += not adds_spaces
    assert num_exact > 100
    assert num_refused > 20


@pytest.mark.parametrize(
    "decoder, falls_back, expected",
    [
        (decoders.Metaspace(), False, b"<0x41>"),
        (decoders.Metaspace(), True, b"A"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), False, b"A"),
        (decoders.ByteLevel(), True, b"<0x41>"),
    ],
)
def test_a_byte_is_spelt_only_where_bytes_stand_in(decoder, falls_back, expected):
    backend = Backend(models.BPE({"<0x41>": 0}, [], byte_fallback=falls_back))
    backend.decoder = decoder
    assert Tokenizer(backend).token_bytes(0) == expected
