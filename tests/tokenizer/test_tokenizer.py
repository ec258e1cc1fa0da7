"""Tokenizers against `transformers`' own, trained here on a few sentences; SmolLM2's from its GGUF where present."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flexgen_helm.errors import CheckpointError, RequestError, UnsupportedArchitectureError
from flexgen_helm.tokenizer.token_bytes import byte_alphabet, helm_text
from flexgen_helm.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "In 1998 and 2024, the price was 3.14 or 1234567 euros; naïve café owners paid 99 €.",
    "def f(x):\n    return x + 1\n\n\nprint(f(2))  # the answer",
    "日本語の文章です。 Ελληνικά. 👍👍 emoji 👩‍👩‍👧",
] * 3
SAMPLES = [*CORPUS[:4], "", " ", "  two", "\n", "a", "½ ² ٣", "<s>", "</s> hi", "\x00\x7f", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


def byte_level(specials: list[str], size: int = 500) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece_like() -> Backend:
    """Llama 2's form: unknown, BOS, EOS, 256 byte pieces, characters, then merges in the order learnt."""
    learnt = Backend(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()
    learnt.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(learnt.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    unmark = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(unmark)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = bos_in_front("<s>", 1)
    return backend


def bos_in_front(token: str, token_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B:1"], special_tokens=[(token, token_id)]
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint folder per kind of tokenizer; only tokenizer files lie in it."""
    root = tmp_path_factory.mktemp("tokenizers")
    plain = byte_level(["<|endoftext|>"])
    with_bos = byte_level(["<s>", "</s>"])
    with_bos.post_processor = bos_in_front("<s>", 0)
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, backend, config in (
        ("plain", plain, {"eos_token": "<|endoftext|>"}),
        ("with_bos", with_bos, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}),
        ("llama", sentencepiece_like(), {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    ):
        write(root / name, "tokenizer.json", backend.to_str())
        write(root / name, "tokenizer_config.json", generic | config)

    opt = byte_level(["<s>", "<pad>", "</s>", "<unk>"])
    (root / "opt").mkdir()
    opt.model.save(str(root / "opt"))
    specials = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    write(root / "opt", "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True} | specials)
    write(root / "opt", "config.json", {"model_type": "opt", "bos_token_id": 2, "eos_token_id": 2})
    return {path.name: path for path in root.iterdir()}


KINDS = ["plain", "with_bos", "llama", "opt"]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(folders: dict[str, Path], kind: str) -> None:
    ours, theirs = load(folders[kind]), AutoTokenizer.from_pretrained(folders[kind])
    for special in (True, False):
        want = theirs(SAMPLES, add_special_tokens=special)["input_ids"]
        got = ours.encode_batch(SAMPLES, add_special_tokens=special)
        # Only a text that brings its own BOS differs: it gets no second one.
        doubled = [special and ours.adds_bos and text.startswith(ours.bos_text or "-") for text in SAMPLES]
        assert got == [ids[1:] if cut else ids for ids, cut in zip(want, doubled, strict=True)]
        assert [ours.encode(text, special) for text in SAMPLES] == got
    for text in SAMPLES[:4]:
        ids = ours.encode(text, add_special_tokens=False)
        start = " " if kind == "llama" else ""  # theirs strips the space that sentencepiece put in front
        assert ours.decode(ids) == f"{start}{theirs.decode(ids, clean_up_tokenization_spaces=False)}"
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.bos_text) == (theirs.bos_token_id, theirs.bos_token)
    assert (ours.eos_ids, ours.eos_text) == ({theirs.eos_token_id}, theirs.eos_token)


def test_what_plain_text_is_given(folders: dict[str, Path]) -> None:
    facts = {kind: (load(folders[kind]).adds_bos, load(folders[kind]).bos_id) for kind in KINDS}
    assert facts == {"plain": (False, None), "with_bos": (True, 0), "llama": (True, 1), "opt": (True, 2)}
    opt = load(folders["opt"])
    assert opt.encode("</s>hi") == opt.encode("hi") == [2, *opt.encode("hi", add_special_tokens=False)]
    assert opt.encode("</s></s>hi")[:3] == [2, 2, opt.encode("hi")[1]]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_join_to_the_text(folders: dict[str, Path], kind: str, text: str) -> None:
    text = text.replace("▁", "")  # sentencepiece has one piece for this character and for a space
    tokenizer = _cached(folders[kind])
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(map(tokenizer.token_bytes, ids))
    start = " " if kind == "llama" and text else ""
    assert data == (start + text).encode("utf-8")
    assert tokenizer.decode(ids) == start + text


_loaded: dict[Path, Tokenizer] = {}


def _cached(path: Path) -> Tokenizer:
    return _loaded.setdefault(path, _loaded.get(path) or load(path))


def test_helm_spelling_and_incomplete_text(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["llama"])
    ids = tokenizer.encode("a🦊", add_special_tokens=False)
    assert tokenizer.token_texts(ids)[-4:] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x8a"]
    assert tokenizer.decode(ids[:-1]) == " a\ufffd"
    assert tokenizer.token_texts([1, 2]) == ["<s>", "</s>"]
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert helm_text(b"\xc3\xa9") == "é"


def test_byte_alphabet_is_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    for char in map(chr, range(0x100)):
        (piece, _), *more = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(char)
        assert not more
        assert bytes(alphabet[c] for c in piece) == char.encode("utf-8")


def test_end_ids_come_from_every_configuration(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["plain"], tmp_path / "model")
    write(folder, "config.json", {"eos_token_id": None, "text_config": {"eos_token_id": 7}})
    write(folder, "generation_config.json", {"eos_token_id": [8, 9]})
    assert load(folder).eos_ids == {0, 7, 8, 9}


def test_truncation_and_padding_are_switched_off(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["plain"], tmp_path / "cut")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50, pad_id=0, pad_token="<|endoftext|>")
    write(folder, "tokenizer.json", backend.to_str())
    cut, want = load(folder), load(folders["plain"])
    assert cut.encode(CORPUS[0]) == want.encode(CORPUS[0])
    assert cut.fingerprint == want.fingerprint
    assert want.fingerprint != load(folders["with_bos"]).fingerprint


def test_chat_template(folders: dict[str, Path]) -> None:
    ours, theirs = load(folders["with_bos"]), PreTrainedTokenizerFast.from_pretrained(folders["with_bos"])
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    for prompt in (True, False):
        want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == want
    assert ours.apply_chat_template(messages[:1]) == "<s>[user] hi\n[assistant]"
    with pytest.raises(RequestError, match="no tools"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])
    with pytest.raises(RequestError, match="no chat template"):
        load(folders["plain"]).apply_chat_template(messages)


@pytest.mark.parametrize("kind", ["plain", "opt"])
def test_code_of_the_checkpoint_is_never_run(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    write(folder, "tokenizer_config.json", config)
    write(folder, "evil.py", f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Evil: ...\n")
    try:
        assert load(folder).encode(CORPUS[0]) == load(folders[kind]).encode(CORPUS[0])
    except CheckpointError:
        assert kind == "opt"  # without tokenizer.json the class is needed, and it is refused
    assert not (tmp_path / "ran").exists()


def test_missing_damaged_and_foreign_files(tmp_path: Path) -> None:
    assert Tokenizer.from_path(tmp_path) is None
    with pytest.raises(CheckpointError, match="neither a folder"):
        Tokenizer.from_path(tmp_path / "nothing")
    write(tmp_path / "damaged", "tokenizer.json", '{"version": "1.0", "mod')
    with pytest.raises(CheckpointError, match="damaged"):
        Tokenizer.from_path(tmp_path / "damaged")
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    write(tmp_path / "words", "tokenizer.json", words.to_str())
    with pytest.raises(UnsupportedArchitectureError, match="WordPiece"):
        Tokenizer.from_path(tmp_path / "words")


def test_text_that_is_not_unicode_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="text 1 .* at character 2"):
        load(folders["plain"]).encode_batch(["fine", "ab\ud800"])
