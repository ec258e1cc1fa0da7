"""Render an untrusted chat template in the sandbox of `transformers`, for a bounded time.

The sandbox keeps the template from attributes, files and modules. It does not keep it from looping for ever, and a
template whose loop depends on the messages does so in the middle of a run. What remains is memory: a template can ask
for a string as large as the process may be (SECURITY.md).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from flexgen_helm.concurrency import import_lock
from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer.chat import DATE

# Products outside of loops cannot be interrupted, and each doubles an integer's digits.
_MAX_PRODUCTS = 8
MAX_CPU_S = 1.0  # a template takes milliseconds; processor time, because the machine may be busy
_LOOK_S = 0.5


class _OutOfTime(BaseException):
    """Raised in a thread that renders; no Exception, because the sandbox catches some of these."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
) -> str:
    """Return the text of `messages`; as in `transformers`, a key of a message whose value is None is left out.

    variables: of the template; `strftime_now` is the date that this function of the template tells.

    Raises `RequestError` where the template fails, and where it takes longer than any template should.
    """
    _require_interruptible(template)
    # The renderer behind `PreTrainedTokenizer.apply_chat_template`, which needs no tokenizer of `transformers`.
    with import_lock("transformers"):
        from transformers.utils import chat_template_utils

    setattr(chat_template_utils, "datetime", _Clock)  # noqa: B010
    function: Any = chat_template_utils.render_jinja_template  # annotated as a string, but returns two lists
    variables = dict(variables)
    date = _date(variables.pop("strftime_now", DATE))
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    told = _told.set(date)
    try:
        if "strftime_now" in template and function([chat], chat_template=_DAY)[0] != [date.strftime("%Y-%m-%d")]:
            raise RequestError(
                "this release of transformers tells templates today's date, so prompts would change daily"
            )
        with _watchdog.limited():
            texts, _ = function(
                [chat], chat_template=template, add_generation_prompt=add_generation_prompt, **variables
            )
    except _OutOfTime:
        raise RequestError(
            f"the checkpoint's chat template computes for more than {MAX_CPU_S:g} s on these messages; "
            "take --chat-template false, or another template"
        ) from None
    except RequestError:
        raise
    except Exception as error:  # the template is a program of the checkpoint's author
        raise RequestError(f"the checkpoint's chat template refuses these messages: {error}") from error
    finally:
        _told.reset(told)
    return str(texts[0])


# The date that templates get in this thread; a template that says it.
_told: ContextVar[datetime | None] = ContextVar("told", default=None)
_DAY = "{{ strftime_now('%Y-%m-%d') }}"


class _Clock(datetime):
    """What `transformers` asks for the time: a template of ours gets its date, and others today's."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return _told.get() or datetime.now(tz)


def _date(text: Any) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise RequestError(f"the template's strftime_now is {text!r}; give a date such as {DATE}") from None


@lru_cache(maxsize=8)
def _require_interruptible(template: str) -> None:
    """Refuse powers and many products: `9**9**9` is one step, which nothing interrupts, and no chat needs them."""
    try:
        tokens = [token for token in Environment().lex(template) if token[1] != "whitespace"]
    except TemplateSyntaxError:
        return  # the renderer says so
    # Behind "(" or "," two stars hand over keyword arguments.
    powers = [before for before, token in pairwise(tokens) if token[1:] == ("operator", "**")]
    if any(text not in ("(", ",") for _, _, text in powers):
        raise RequestError("the checkpoint's chat template computes a power (**), which no chat needs; it is not run")
    products = sum(token[1:] == ("operator", "*") for token in tokens)
    if products > _MAX_PRODUCTS:
        raise RequestError(
            f"the checkpoint's chat template computes {products} products (*), which no chat needs; it is not run"
        )


class _Watchdog:
    """One thread that looks after all threads that render, and ends when none does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, tuple[int, float]] = {}  # thread -> clock of its processor time, and when to stop it
        self._watcher: threading.Thread | None = None

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Raise `_OutOfTime` in this thread once it has computed for `MAX_CPU_S` inside."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        with self._lock:
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="flexgen-templates", daemon=True)
                watcher.start()  # raises where the system has no more threads
                self._watcher = watcher
            self._ends[thread] = clock, time.clock_gettime(clock) + MAX_CPU_S
        try:
            yield
        finally:
            self._ends.pop(thread)
            with self._lock:
                pass  # the watcher may be about to raise
            # An exception that was set for this thread comes with a call, and not later in another's code.
            (lambda: None)()

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                for thread, (clock, end) in list(self._ends.items()):
                    # Again and again: code that catches everything may have caught the last one.
                    if time.clock_gettime(clock) > end and thread in self._ends:
                        error = ctypes.py_object(_OutOfTime)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
                if not self._ends:
                    self._watcher = None
                    return


_watchdog = _Watchdog()
