"""The models that a service is asked for, and what must be known of one before it is loaded.
Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_helm.checkpoint import names, suffixes
from flexgen_helm.checkpoint.fetch import fetch
from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.checkpoint.generation_config import GenerationSettings, read_generation_settings
from flexgen_helm.checkpoint.local_files import local_weights
from flexgen_helm.concurrency import single_flight
from flexgen_helm.config import PROMPT_OPTIONS, EngineConfig, EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.tokenizer.chat import ChatFormat, chat_format

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer


# Of the most recently used prompts: some tens of megabytes.
MAX_CACHED_TEXTS = 16_384


@dataclass(frozen=True)
class ModelArguments:
    """A model as a caller asks for it.

    name: as the user wrote it
    path: name, folder or file for `Engine.from_config`, without suffixes
    options: those of `EngineConfig` that were given
    """

    name: str
    path: str
    revision: str | None = None
    options: EngineOptions = field(default_factory=dict, hash=False)

    @cached_property
    def config(self) -> EngineConfig:
        """Check the options. Raises UsageError, on use and not before: other models of the suite
        are still run.
        """
        return EngineConfig(revision=self.revision, **self.options)

    @cached_property
    def engine_key(self) -> ModelArguments:
        """What decides the engine: models with equal keys share it, whatever their names and
        settings of prompts.
        """
        options = {
            name: value for name, value in self.options.items() if name not in PROMPT_OPTIONS
        }
        return replace(self, name=self.path, options=options)


def model_arguments(
    name: str, options: EngineOptions, revision: str | None = None
) -> ModelArguments:
    """Return the model of a name, checked before anything is read.

    options: override the name's suffixes. revision: of the hub's repository.
    Raises `UsageError` for a name or an option that cannot be.
    """
    resolved = names.resolve(name, revision)
    path = resolved.path or (
        resolved.entry.name if resolved.entry is not None else resolved.hub_repo
    )
    arguments = ModelArguments(
        name, str(path), resolved.revision, {"precision": "fp16", **resolved.options, **options}
    )
    assert arguments.config  # refuses what cannot be
    return arguments


@dataclass(frozen=True)
class ModelFacts:
    """What must be known before the model is loaded.

    instruct, is_base: tuned to follow instructions, or not; both are false where neither catalog
        nor name says it.
    """

    display_name: str
    max_positions: int
    num_parameters: int
    instruct: bool
    is_base: bool = False


def read_facts(model: ModelArguments) -> ModelFacts:
    """Read facts from the catalog if it has the model, else from the checkpoint's configuration;
    never weights.
    """
    resolved = names.resolve(model.path, model.revision)
    if resolved.path is not None and model.options.get("weights") != "dummy":
        local_weights(resolved)  # refuses a folder without weights before a harness reads data
    if resolved.entry is not None:
        config = resolved.entry.config
    else:
        path = fetch_model(model)
        if path.is_dir():
            config = read_config(path).config
        else:
            from flexgen_helm.checkpoint.open import open_checkpoint

            config = open_checkpoint(path).config
    named = replace(resolved, name=suffixes.base_name(model.name))
    return ModelFacts(
        model.name, config.max_positions, config.num_parameters, named.is_instruct, named.is_base
    )


def needs_download(model: ModelArguments) -> bool:
    """Whether facts of the model are read from a hub repository."""
    resolved = names.resolve(model.path, model.revision)
    return resolved.path is None and resolved.entry is None


def load_tokenizer(model: ModelArguments) -> Tokenizer | None:
    """Load the model's tokenizer, without its weights; None if it has none."""
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

    return Tokenizer.from_path(fetch_model(model))


def read_generation(model: ModelArguments) -> GenerationSettings:
    """Read what the model's folder says of every answer."""
    path = fetch_model(model)
    return read_generation_settings(path if path.is_dir() else None, model.config.generation_config)


def fetch_model(model: ModelArguments) -> Path:
    """Return the model's folder or .gguf file on this machine; fetch it first if needed."""
    path = fetch(model.path, model.revision)
    return path.parent if path.suffix == ".safetensors" else path


class PromptEncoder:
    """Token ids of texts without special tokens; the most recently used texts stay cached.

    Under HELM the window check, the submitted block, the client and the token counts share it, in
    both passes of `flexgen-helm run`. Safe to use from many threads.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._encode = lru_cache(MAX_CACHED_TEXTS)(
            lambda text: array("i", tokenizer.encode(text, add_special_tokens=False))
        )

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of `text`. Raises `RequestError` for a text that is not valid Unicode."""
        return tuple(self._encode(text))

    def context_tokens(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return what a prompt with these ids lacks in front, such as BOS."""
        return self.tokenizer.missing_prefix(ids)


class ModelReader:
    """What a harness needs to write prompts for models, read once per model. Safe to use from many
    threads.

    facts: sizes and nature of a model.
    chat: the chat format of a model. Raises `UsageError` where its template cannot be used.
    harness: the one that is named to a user whose model has no tokenizer.
    """

    def __init__(
        self,
        harness: str,
        load_tokenizer: Callable[[ModelArguments], Tokenizer | None] = load_tokenizer,
        read_facts: Callable[[ModelArguments], ModelFacts] = read_facts,
    ) -> None:
        self.facts = single_flight(read_facts)

        @single_flight
        def encoder(path: str, revision: str | None) -> PromptEncoder:
            tokenizer = load_tokenizer(ModelArguments(path, path, revision))
            if tokenizer is None:
                raise UsageError(
                    f"the model {path} has no tokenizer files, and {harness} works with text; put "
                    "its tokenizer.json beside the weights, or vocab.json with merges.txt "
                    "(tokenizer.model, tiktoken.model and tekken.json are not read)"
                )
            return PromptEncoder(tokenizer)

        @single_flight
        def chat(model: ModelArguments) -> ChatFormat:
            options = model.config.chat
            if options.apply_chat_template is None:
                options = replace(options, apply_chat_template="auto")
            return chat_format(
                self.encoder(model).tokenizer, options, model.name, self.facts(model).is_base
            )

        self._encoder, self.chat = encoder, chat

    def encoder(self, model: ModelArguments) -> PromptEncoder:
        """Return the prompt encoder of the model's checkpoint, shared by all its precisions."""
        return self._encoder(model.path, model.revision)
