"""The state that HELM's callbacks share.

HELM constructs clients, tokenizers and metrics by their class names and passes them nothing of ours; each of them asks
`get_context()`. Tests set a context of their own.
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from helm.common.hierarchical_logger import hwarn
from helm.common.request import Request

from flexgen_helm.concurrency import single_flight
from flexgen_helm.plugin import models
from flexgen_helm.plugin.convert import PreparedRequest, may_be_rendered, to_generation_request
from flexgen_helm.plugin.models import ModelArguments, ModelFacts
from flexgen_helm.plugin.prompt_encoder import PromptEncoder
from flexgen_helm.plugin.service import EngineLoader, Service
from flexgen_helm.progress import Message, report
from flexgen_helm.tokenizer.chat import ChatFormat, chat_format

if TYPE_CHECKING:
    from flexgen_helm.plugin.suite import Suite
    from flexgen_helm.plugin.usage import HelmRun
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


class PluginContext:
    """One per process.

    service: the engine and its queue.
    facts: sizes and nature of a model; read once per model.
    chat: the chat format of a model; decided once per model. Raises `UsageError` where its template cannot be used.
    engine_options: client arguments that win over every deployment's own; the flags of `flexgen-helm run`.
    run: the HELM run in progress, if it is one of ours.
    dry_run: folder of the HELM run in progress, if it is one of ours and computes nothing.
    suite: the `flexgen-helm run` in progress; None under `helm-run`.
    generated: what our generators of HELM's registries made; called with the function and a name.
    warn_once, tell_once: say a sentence to the user once.
    completed: deployments in HELM's registry that a user's file names and the plugin completed.
    """

    def __init__(
        self,
        loader: EngineLoader | None = None,
        load_tokenizer: Callable[[ModelArguments], Tokenizer] = models.load_tokenizer,
        read_facts: Callable[[ModelArguments], ModelFacts] = models.read_facts,
    ) -> None:
        self.service = Service(loader or EngineLoader())
        self.facts = single_flight(read_facts)
        self.engine_options: Mapping[str, Any] = {}
        self.run: HelmRun | None = None
        self.dry_run: Path | None = None
        self.suite: Suite | None = None
        self.completed: set[str] = set()
        self.warn_once = cache(hwarn)
        self.tell_once = cache(lambda text, is_warning: report(Message(text, is_warning)))

        @single_flight
        def generated(make: Callable[[str], T], name: str) -> T:
            return make(name)

        @single_flight
        def encoder(path: str, revision: str | None) -> PromptEncoder:
            return PromptEncoder(load_tokenizer(ModelArguments(path, path, revision)))

        @single_flight
        def chat(model: ModelArguments) -> ChatFormat:
            options = model.config.chat
            if options.apply_chat_template is None:
                options = replace(options, apply_chat_template="auto")
            return chat_format(self.encoder(model).tokenizer, options, model.name, self.facts(model).is_base)

        self.generated, self._encoder, self.chat = generated, encoder, chat

    def find_model(self, name: str, arguments: Mapping[str, Any] | None = None) -> ModelArguments:
        """Return the model behind a deployment's name; `arguments` are those of its entry. See `models.find_model`."""
        return models.find_model(name, arguments, self.engine_options)

    def encoder(self, model: ModelArguments) -> PromptEncoder:
        """Return the prompt encoder of the model's checkpoint, shared by all its precisions."""
        return self._encoder(model.path, model.revision)

    def prepare(self, model: ModelArguments, request: Request) -> PreparedRequest:
        """Translate a request of HELM. Submitted blocks and clients both call this, so their keys are equal.

        Raises `NonRetriableException` for a field that is not supported.
        """
        chat = self.chat(model) if may_be_rendered(request) else None  # a broken template costs no score
        return to_generation_request(request, self.encoder(model), self.facts(model).max_positions, chat)


_context = PluginContext()


def get_context() -> PluginContext:
    return _context


def set_context(context: PluginContext) -> PluginContext:
    """Replace the context of this process; returns the one before."""
    global _context
    previous, _context = _context, context
    return previous


@atexit.register
def _close_at_exit() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C would end in a traceback
    _context.service.close()
    # Python searches all that is left for cycles before it ends, 1.5 s with HELM's and PyTorch's modules. Triton needs
    # that search: without it, it prints a page of objects that it takes for leaked.
    if "triton" not in sys.modules:
        gc.freeze()
