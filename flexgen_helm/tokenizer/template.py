"""Render an untrusted chat template in the sandbox of `transformers`.

The sandbox keeps the template from attributes, files and modules. It does not keep it from looping
for ever, nor from asking for a string as large as the process may be (SECURITY.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from flexgen_helm.concurrency import import_lock
from flexgen_helm.errors import RequestError
from flexgen_helm.tokenizer import DATE

# Of a template: each may double an integer's digits.
_MAX_PRODUCTS = 8


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the text of `messages`; as in `transformers`, a key of a message whose value is None
    is left out.

    variables: of the template; `strftime_now` is the date that this function of the template tells.

    Raises `RequestError` where the template fails.
    """
    _refuse_large_numbers(template)
    # The renderer behind `PreTrainedTokenizer.apply_chat_template`, which needs no tokenizer of
    # `transformers`.
    with import_lock("transformers"):
        from transformers.utils import chat_template_utils

    setattr(chat_template_utils, "datetime", _Clock)  # noqa: B010
    # annotated as a string, but returns two lists
    render_jinja: Any = chat_template_utils.render_jinja_template
    variables = dict(variables)
    date = _date(variables.pop("strftime_now", DATE))
    chat = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    token = _template_date.set(date)
    try:
        if "strftime_now" in template and render_jinja([chat], chat_template=_DAY)[0] != [
            date.strftime("%Y-%m-%d")
        ]:
            raise RequestError(
                "this release of transformers tells templates today's date, so prompts would "
                "change daily"
            )
        texts, _ = render_jinja(
            [chat], chat_template=template, add_generation_prompt=add_generation_prompt, **variables
        )
    except RequestError:
        raise
    except Exception as error:  # the template is a program of the checkpoint's author
        raise RequestError(
            f"the checkpoint's chat template refuses these messages: {error}"
        ) from error
    finally:
        _template_date.reset(token)
    return str(texts[0])


# The date that templates get in this thread.
_template_date: ContextVar[datetime | None] = ContextVar("template_date", default=None)
# A template that shows whether they get it.
_DAY = "{{ strftime_now('%Y-%m-%d') }}"


class _Clock(datetime):
    """What `transformers` asks for the time: a template of ours gets its date, and others
    today's.
    """

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return _template_date.get() or datetime.now(tz)


def _date(text: Any) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise RequestError(
            f"the template's strftime_now is {text!r}; give a date such as {DATE}"
        ) from None


@lru_cache(maxsize=8)
def _refuse_large_numbers(template: str) -> None:
    """Refuse powers and many products: `9**9**9` is one step, which Ctrl-C does not end, and no
    chat needs them.
    """
    try:
        tokens = [token for token in Environment().lex(template) if token[1] != "whitespace"]
    except TemplateSyntaxError:
        return  # the renderer says so
    # Behind "(" or "," two stars hand over keyword arguments.
    powers = [before for before, token in pairwise(tokens) if token[1:] == ("operator", "**")]
    if any(text not in ("(", ",") for _, _, text in powers):
        raise RequestError(
            "the checkpoint's chat template computes a power (**), which no chat needs; it is not "
            "run"
        )
    products = sum(token[1:] == ("operator", "*") for token in tokens)
    if products > _MAX_PRODUCTS:
        raise RequestError(
            f"the checkpoint's chat template computes {products} products (*), which no chat "
            "needs; it is not run"
        )
