"""What a tokenizer's files say is taken or refused: templates, ends, bytes, code that is never
run.
"""

import json
import shutil

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from flexgen_helm.errors import CheckpointError, RequestError, UnsupportedArchitectureError
from flexgen_helm.tokenizer.token_bytes import byte_alphabet, helm_text
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers_by_family import FAMILIES

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no "
    "tools') }}{% endif %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}{% if "
    "add_generation_prompt %}[assistant]{% endif %}"
)


def write(folder, name, content):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(
        content if isinstance(content, str) else json.dumps(content), encoding="utf-8"
    )


def load(path):
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {name: FAMILIES[name].write(root / name) for name in ("gpt2", "llama2", "opt")}
    write(folders["llama2"], "chat_template.jinja", TEMPLATE)
    return folders


def test_helm_spelling_and_incomplete_text(folders):
    tokenizer = load(folders["llama2"])
    ids = tokenizer.encode("a🦊", add_special_tokens=False)
    assert tokenizer.token_texts(ids)[-4:] == [
        r"bytes:\xf0",
        r"bytes:\x9f",
        r"bytes:\xa6",
        r"bytes:\x8a",
    ]
    assert tokenizer.decode(ids[:-1]) == " a\ufffd"
    assert tokenizer.token_texts([1, 2]) == ["<s>", "</s>"]
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""
    assert helm_text(b"\xc3\xa9") == "é"


def test_byte_alphabet_is_the_librarys():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    for char in map(chr, range(0x100)):
        (piece, _), *more = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(char)
        assert not more
        assert bytes(alphabet[c] for c in piece) == char.encode("utf-8")


def test_end_ids_come_from_every_configuration(folders, tmp_path):
    folder = shutil.copytree(folders["gpt2"], tmp_path / "model")
    write(folder, "config.json", {"eos_token_id": None, "text_config": {"eos_token_id": 7}})
    write(folder, "generation_config.json", {"eos_token_id": [8, 9]})
    assert load(folder).eos_ids == {*load(folders["gpt2"]).eos_ids, 7, 8, 9}


def test_chat_template(folders):
    ours, theirs = load(folders["llama2"]), AutoTokenizer.from_pretrained(folders["llama2"])
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    for prompt in (True, False):
        want = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == want
    assert ours.apply_chat_template(messages[:1]) == "<s>[user] hi\n[assistant]"
    with pytest.raises(RequestError, match="no tools"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])
    with pytest.raises(RequestError, match="no chat template"):
        load(folders["gpt2"]).apply_chat_template(messages)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_code_of_the_checkpoint_is_never_run(folders, tmp_path, kind):
    folder = shutil.copytree(folders[kind], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    write(folder, "tokenizer_config.json", config)
    write(
        folder,
        "evil.py",
        f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\nclass Evil: ...\n",
    )
    try:
        assert load(folder).encode(TEXT) == load(folders[kind]).encode(TEXT)
    except CheckpointError:
        assert kind == "opt"  # without tokenizer.json the class is needed, and it is refused
    assert not (tmp_path / "ran").exists()


def test_missing_damaged_and_foreign_files(tmp_path):
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


def test_text_that_is_not_unicode_is_refused(folders):
    with pytest.raises(RequestError, match="text 1 .* at character 2"):
        load(folders["gpt2"]).encode_batch(["fine", "ab\ud800"])
