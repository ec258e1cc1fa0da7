"""The tokenizer of a checkpoint: a fast backend, the checkpoint's settings, and the exact bytes of
each token.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tokenizers import Tokenizer as Backend

from flexgen_helm.checkpoint.fingerprint import SourceFile
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_FILES,
    require_small_file,
    tokenizer_folder,
)
from flexgen_helm.checkpoint.generation_config import configured_eos_ids
from flexgen_helm.concurrency import import_lock
from flexgen_helm.errors import CheckpointError, RequestError
from flexgen_helm.progress import ProgressPhase, report
from flexgen_helm.tokenizer.token_bytes import helm_text, token_byte_table, vocabulary_kind

_in_use: WeakValueDictionary[tuple[SourceFile, ...], Tokenizer] = WeakValueDictionary()
_lock = threading.RLock()


class Tokenizer:
    """Text to ids and back. Immutable and safe to share between threads.

    vocab_size: all ids are below it; a model's embedding may have more rows.
    bos_id, bos_text: the token that begins a text, None if the tokenizer has none.
    prefix: ids that the tokenizer puts in front of a text, such as BOS; what it puts behind would
        end it: left out.
    eos_ids: every id that ends a completion, according to tokenizer and generation configuration.
    eos_text: the tokenizer's own end token, None if it has none.
    chat_template: the checkpoint's Jinja template, None if it has none.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Take ownership of `backend`.

        special_tokens: {'bos_token': '<s>', …}, which the chat template may use.

        Raises `UnsupportedArchitectureError` if the vocabulary's tokens do not determine bytes.
        """
        # tokenizer.json may switch on both, and a prompt must never be cut or padded unseen
        backend.no_truncation()
        backend.no_padding()
        # the text of a special token inside a prompt is that token
        backend.encode_special_tokens = False
        # left by training, where they cut texts at random
        for name in ("dropout", "alpha", "nbest_size"):
            if getattr(backend.model, name, None) is not None:
                setattr(backend.model, name, None)
        # raises for tokens that determine no bytes: here, not at the first completion
        vocabulary_kind(backend)
        self._backend = backend
        self.vocab_size: int = 1 + max(
            backend.get_vocab(with_added_tokens=True).values(), default=-1
        )
        plain, default = (
            backend.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        #   default   [gMASK] <sop> a </s>      plain   a
        text_begin = next(
            index
            for index in range(len(default), -1, -1)
            if default[index : index + len(plain)] == plain
        )
        self.prefix = tuple(default[:text_begin])
        self.bos_id = next(iter(self.prefix), None) if bos_id is None else bos_id
        self.bos_text = None if self.bos_id is None else backend.id_to_token(self.bos_id)
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos_id is None else {eos_id})
        self.eos_text = None if eos_id is None else backend.id_to_token(eos_id)
        self.chat_template = chat_template
        named = {"bos_token": self.bos_text, "eos_token": self.eos_text}
        self._special_tokens = special_tokens or {
            name: text for name, text in named.items() if text is not None
        }

    # ---- loading ----

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint folder or of one `.gguf` file; None if it has none.

        Never runs code that came with the checkpoint and never uses the network. Raises
        `CheckpointError` if the files are damaged or need code of their own,
        `UnsupportedArchitectureError` for an unsupported kind.

        While a tokenizer is in use, the same files give the same one: of a large vocabulary it
        takes seconds to build, and HELM's threads and the engines of all precisions ask for it.
        """
        with _lock:
            key = _source_files(Path(path))
            if (tokenizer := _in_use.get(key)) is None:
                report(ProgressPhase("tokenizer", Path(path).name))
                if (tokenizer := cls._from_path(Path(path))) is not None and key:
                    _in_use[key] = tokenizer
            return tokenizer

    @classmethod
    def _from_path(cls, path: Path) -> Tokenizer | None:
        if path.is_file() and path.suffix == ".gguf":
            # Imported late: the gguf package is needed for these files only.
            from flexgen_helm.tokenizer.gguf_tokenizer import read_gguf_tokenizer

            read = read_gguf_tokenizer(path)
            return None if read is None else cls(**read)
        if not path.is_dir():
            raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
        return None if tokenizer_folder(path) is None else cls._from_folder(path)

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        _require_complete(folder)
        # Imported late: `transformers` takes seconds, and an engine that is given token ids does
        # not need it.
        with import_lock("transformers"):
            if (folder / "tokenizer.json").is_file():
                # The generic class takes tokenizer.json as published; an architecture's own would
                # rebuild parts of it.
                from transformers import PreTrainedTokenizerFast as Loader
            else:
                from transformers import AutoTokenizer as Loader  # type: ignore[assignment]
            try:
                # Under the lock as well: `AutoTokenizer` imports the module of the architecture
                # here.
                loaded: Any = Loader.from_pretrained(
                    str(folder), trust_remote_code=False, local_files_only=True
                )
            # from Rust, JSON and `transformers`, which share no base class
            except Exception as error:
                raise CheckpointError(
                    f"the tokenizer in {folder} cannot be loaded: {error}"
                ) from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise CheckpointError(
                f"the tokenizer in {folder} has no fast form; save it as tokenizer.json first"
            )
        _require_applied(loaded.init_kwargs, backend, folder)
        template = loaded.chat_template
        return cls(
            backend,
            bos_id=loaded.bos_token_id,
            eos_id=loaded.eos_token_id,
            eos_ids=configured_eos_ids(folder),
            chat_template=template.get("default") if isinstance(template, dict) else template,
            special_tokens=loaded.special_tokens_map,
        )

    # ---- text to ids ----

    @property
    def first_id(self) -> int | None:
        """The token that stands for an empty text: BOS, or EOS where there is no BOS (as such
        models are trained).
        """
        return self.bos_id if self.bos_id is not None else min(self.eos_ids, default=None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; see `encode_batch`."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the ids of each text, in order, computed in parallel.

        add_special_tokens: begin with `prefix` if the text does not. Raises `RequestError` for text
            that is no Unicode.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise RequestError(_why_not_text(texts)) from error
        except BaseException as error:
            # Rust's panic derives from no Exception: a pattern of tokenizer.json that gave up on a
            # text, for example.
            if type(error).__name__ != "PanicException":
                raise
            raise RequestError(f"the tokenizer fails on a text of the request: {error}") from error
        batch = (encoding.ids for encoding in encodings)
        return [[*self.missing_prefix(ids), *ids] if add_special_tokens else ids for ids in batch]

    def missing_prefix(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return `prefix`, or nothing for a text with these ids that begins with its first token.

        HELM's language-modelling adapter sends its prefix token as text, and chat templates write
        BOS.
        """
        return () if tuple(ids[:1]) == self.prefix[:1] else self.prefix

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render `messages` ({'role': …, 'content': …} each) with the checkpoint's own template, in
        a sandbox.

        The text carries its own special tokens: encode it with `add_special_tokens=False`. As in
        `transformers`, `variables` win over special tokens, and a key of a message whose value is
        None is left out. Raises `RequestError` if the checkpoint has no template or the template
        fails for these messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "the checkpoint has no chat template; send a prompt instead of messages"
            )
        from flexgen_helm.tokenizer.template import render  # a GPU machine may lack jinja2

        return render(
            self.chat_template,
            messages,
            add_generation_prompt,
            {**self._special_tokens, **variables},
        )

    # ---- ids to text ----

    def token_bytes(self, token_id: int) -> bytes:
        """Return exactly what a token contributes inside running text; empty for an id without a
        token.

        A sentencepiece token's leading space is kept, also at the start of a text. A special token
        is its text.
        """
        table = self._byte_table
        return table[token_id] if 0 <= token_id < len(table) else b""

    def token_texts(self, ids: Iterable[int]) -> list[str]:
        r"""Return each token as HELM wants it: text where its bytes are whole UTF-8, else
        `bytes:\xNN\xNN`.
        """
        return [helm_text(self.token_bytes(i)) for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the joined bytes, with U+FFFD where they are not UTF-8; nothing is
        cleaned up.
        """
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def decode_plain(self, ids: Iterable[int]) -> str:
        """Return a text as `transformers` decodes it: no special tokens, no space that
        sentencepiece put in front.
        """
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write the backend as a `tokenizer.json`."""
        self._backend.save(str(path))

    # ---- identity ----

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that answers depend on: equal means equal ids and texts, ends of
        completions, and chats.

        It is made of what was read, so that it does not matter which of a folder's files said it.
        """
        chat = [] if self.chat_template is None else [self.chat_template, self._special_tokens]
        settings = [self.bos_id, self.prefix, sorted(self.eos_ids), self.eos_text, chat]
        text = json.dumps([self._backend.to_str(), *settings], sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    @cached_property
    def _byte_table(self) -> list[bytes]:
        return token_byte_table(self._backend)


def _source_files(path: Path) -> tuple[SourceFile, ...]:
    """Return the files that a tokenizer is made of, as they are now."""
    names = (CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)
    files = (
        [path]
        if path.is_file()
        else [*(path / name for name in names), *path.glob("additional_chat_templates/*")]
    )
    return tuple(SourceFile.open(file.resolve()) for file in files if file.is_file())


def _require_applied(settings: Mapping[str, Any], backend: Backend, folder: Path) -> None:
    """Refuse settings of `tokenizer_config.json` that change token ids and that `tokenizer.json`
    does not have.
    """
    steps = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    spaces = {
        step["add_prefix_space"]
        for step in (steps, *steps.get("pretokenizers", ()))
        if "add_prefix_space" in step
    }
    space = settings.get("add_prefix_space")
    wrong = "split_special_tokens" if settings.get("split_special_tokens") else ""
    if spaces and space not in (None, any(spaces)):
        wrong = "add_prefix_space"
    if wrong:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} sets {wrong} to {settings[wrong]}, and "
            "tokenizer.json does otherwise; take the entry out if tokenizer.json is right"
        )


def _require_complete(folder: Path) -> None:
    """Refuse what `transformers` would guess: merges from the order of a vocabulary, special tokens
    from a class.

    Refuse files too that it would read for ever.
    """
    for file in (
        *(folder / name for name in (CONFIG, *TOKENIZER_FILES)),
        *folder.glob("additional_chat_templates/*"),
    ):
        require_small_file(file)
    if (folder / "tokenizer.json").is_file():
        return
    if not (folder / "vocab.json").is_file():
        # It would rank merges by id, not by score, and so join the two spaces of '  x', as
        # sentencepiece does not.
        raise CheckpointError(
            f"{folder} has its tokenizer only as tokenizer.model, which is not read; put the "
            "model's tokenizer.json beside it, or run a GGUF file of the model"
        )
    for name, content in (
        ("merges.txt", "the order of merges"),
        ("tokenizer_config.json", "the special tokens"),
    ):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has a vocab.json without {name}, which holds {content}; fetch it again"
            )


def _why_not_text(texts: Sequence[str]) -> str:
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {i} to encode is a {type(text).__name__}, not a string"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return (
                f"text {i} to encode is not valid Unicode: {error.reason} at character "
                f"{error.start}"
            )
    return "a text to encode was refused by the tokenizer"
