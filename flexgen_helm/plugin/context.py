"""The state that HELM's callbacks share.

HELM constructs clients, tokenizers and metrics by their class names and passes them nothing of
ours; each of them asks `get_context()`. Tests set a context of their own.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from helm.benchmark.run_spec import RunSpec
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.concurrency import single_flight
from flexgen_helm.plugin import model_names
from flexgen_helm.plugin.usage import HelmRun
from flexgen_helm.progress import Message, report
from flexgen_helm.service import process
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments, ModelReader
from flexgen_helm.service.service import Service

if TYPE_CHECKING:
    from flexgen_helm.plugin.suite import Suite

T = TypeVar("T")


class PluginContext:
    """The plugin's state, one object per process.

    service: the engine and its queue.
    models: what is read of models before they are loaded.
    engine_options: client arguments that win over every deployment's own; the flags of
        `flexgen-helm run`.
    suite: the call of `flexgen-helm run` in progress; None in `helm-run`.
    run: the HELM run in progress, if it is one of ours.
    dry_run_folder: of the HELM run in progress, if it is one of ours and computes nothing.
    must_have_requests: the run spec in progress whose data must give requests, if it is ours.
    generate_once: makes an entry of HELM's registries by a function and a name, once.
    warn_once: writes a warning to HELM's log, once a text.
    tell_once: shows a sentence by the command's display, or in HELM's log, once a text.
    completed_deployments: those in HELM's registry that a user's file names and the plugin
        completed.
    """

    def __init__(
        self, loader: EngineLoader | None = None, models: ModelReader | None = None
    ) -> None:
        self.service = Service(loader or EngineLoader())
        self.models = models or ModelReader("HELM")
        self.engine_options: Mapping[str, Any] = {}
        self.suite: Suite | None = None
        self.run: HelmRun | None = None
        self.dry_run_folder: Path | None = None
        self.must_have_requests: RunSpec | None = None
        self.completed_deployments: set[str] = set()
        self.warn_once = cache(hwarn)
        self.tell_once = cache(self._tell)

        @single_flight
        def generate_once(make: Callable[[str], T], name: str) -> T:
            return make(name)

        self.generate_once = generate_once

    def _tell(self, text: str, is_warning: bool) -> None:
        report(Message(text, is_warning))

    def find_model(self, name: str, arguments: Mapping[str, Any] | None = None) -> ModelArguments:
        """Return the model behind a deployment's name; arguments: those of its entry, under the
        flags.
        """
        return model_names.find_model(name, arguments, self.engine_options)


_context = PluginContext()


def get_context() -> PluginContext:
    return _context


def set_context(context: PluginContext) -> PluginContext:
    """Replace the context of this process; returns the one before."""
    global _context
    previous, _context = _context, context
    return previous


def interrupt_on_signals() -> None:
    """Have Ctrl-C and SIGTERM end a run within seconds."""
    process.interrupt_on_signals(lambda: _context.service.interrupt())


@atexit.register
def _close_at_exit() -> None:
    process.close_at_exit(lambda: _context.service.close())
