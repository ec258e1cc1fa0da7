"""Chat templates: which prompts get one, and how messages become the text that is encoded. No
torch.

`chat_format` decides once per model. The Python API and HELM's client then render prompts by its
`ChatFormat`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.request import ThinkingFormat, ThinkingMarks
from flexgen_helm.tokenizer import DATE
from flexgen_helm.tokenizer.thinking import MARKS, WRAPPERS

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

TemplateChoice = Literal["auto"] | bool
Message = Mapping[str, Any]
_TRIAL = "Hello"
# A turn that shows how the template writes thoughts, under whichever name it takes them.
_THOUGHT, _ANSWER = "Xyzzy", "Plugh"
_TRIAL_TURN = {"role": "assistant", "content": _ANSWER} | dict.fromkeys(
    ("reasoning_content", "reasoning", "thinking"), _THOUGHT
)


@dataclass(frozen=True)
class ChatOptions:
    """What the user chose.

    apply_chat_template: 'auto', True or False; None leaves the choice to the caller.
    chat_template_kwargs: variables of the template, such as `enable_thinking`.
    system_prompt: goes in front of every chat that has no system message.
    thinking_budget: most tokens of thinking; None for no limit but `max_tokens`.
    """

    apply_chat_template: TemplateChoice | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None
    thinking_budget: int | None = None


@dataclass(frozen=True)
class ChatFormat:
    """What was decided for a model.

    applied: plain prompts become the turn of a user.
    reason: why, or why not, as a part of a sentence.
    """

    tokenizer: Tokenizer = field(repr=False)
    applied: bool
    reason: str
    options: ChatOptions

    def render(self, messages: Sequence[Message] | None, prompt: str | None) -> str | None:
        """Return the text of messages, or of a plain prompt if the format applies to it; None for
        what does not go through the template.
        """
        if messages is not None:
            return self.render_messages(messages)
        return self.render_prompt(prompt) if self.applied and prompt is not None else None

    def render_prompt(self, text: str) -> str:
        """Return a plain prompt as the turn of a user. Raises `RequestError` where the template
        refuses it.
        """
        return self.render_messages([{"role": "user", "content": text}])

    def render_messages(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat, ready for the answer.

        Raises `RequestError` where the template refuses it, and for a part that is no text.
        """
        messages = [self._renderable(message) for message in messages]
        if not messages:
            raise RequestError("a chat needs at least one message")
        system = self.options.system_prompt
        if system is None or any(message["role"] == "system" for message in messages):
            return self._render(messages)
        text = self._render([self._renderable({"role": "system", "content": system}), *messages])
        if system.strip() not in text:
            raise RequestError("the template leaves the system prompt out")
        return text

    def thinking(self, text: str) -> ThinkingFormat | None:
        """Return what the engine must know of a rendered prompt; None for a model that does not
        think.
        """
        outside = self.thinking_format
        if outside is None:
            return None
        # A turn itself may speak of <think>.
        ending = self._ending if self._ending and text.endswith(self._ending) else text
        begin, end, *_ = outside.marks
        return replace(outside, begins_inside=ending.rfind(begin) > ending.rfind(end))

    def describe(self, model: str) -> str:
        """Return the decision as a sentence without its full stop; model: the name in it."""
        if self.applied:
            way = "; --chat-template false sends them unchanged"
            return f"prompts of {model} go through its chat template ({self.reason}){way}"
        way = (
            "; --chat-template true sends them through its chat template"
            if self.tokenizer.chat_template
            else ""
        )
        return f"prompts of {model} are sent unchanged ({self.reason}){way}"

    def as_json(self) -> dict[str, Any]:
        """Return the entry `chat_template` of `flexgen_run.json`."""
        return {"applied": self.applied, "reason": self.reason, **self._content}

    @cached_property
    def identity(self) -> str:
        """What the answers to rendered prompts depend on, besides the model."""
        return json.dumps(self._content, sort_keys=True)

    @property
    def _content(self) -> dict[str, Any]:
        template, thinking = self.tokenizer.chat_template, self.thinking_format
        return {
            "template": template and hashlib.sha256(template.encode()).hexdigest()[:12],
            "kwargs": dict(self.options.chat_template_kwargs),
            "system_prompt": self.options.system_prompt,
            "thinking_budget": thinking.budget if thinking else None,
            **(
                {"thinking_marks": thinking.marks}
                if thinking and thinking.marks != ThinkingMarks()
                else {}
            ),
            **({"date": DATE} if "strftime_now" in (template or "") else {}),
        }

    @cached_property
    def thinking_format(self) -> ThinkingFormat | None:
        """What the engine must know of a prompt that ends outside thinking; None for a model that
        does not think.
        """
        turn = self._behind_trial(_TRIAL_TURN)
        before, _, rest = turn.partition(_THOUGHT)
        between, answer, _ = rest.partition(_ANSWER)
        written = f"{self.tokenizer.chat_template}{turn}"

        def used(pairs: Sequence[tuple[str, str]], index: int) -> list[tuple[str, str]]:
            """Return the pairs whose first or second mark, by `index`, the template writes, then
            those of which that mark is one token.
            """
            are_tokens = [
                pair
                for pair in pairs
                if len(self.tokenizer.encode(pair[index], add_special_tokens=False)) == 1
            ]
            return [*(pair for pair in pairs if pair[index] in written), *are_tokens]

        # Marks that are not known are read off the turn.
        from_turn = (
            (before.removeprefix(self._ending) or before).strip(),
            answer and between.strip(),
        )
        pairs = used(MARKS, 1) + [from_turn] * all(from_turn)
        if not pairs:
            return None
        wrapper, *_ = [*used(WRAPPERS, 0), ("", "")]
        marks = ThinkingMarks(*pairs[0], *wrapper)
        # What ends thinking when its budget is spent, as the template would write it.
        end = between if marks.end in between and marks.end != "</think>" else f"\n{marks.end}\n\n"
        end_ids = tuple(self.tokenizer.encode(end, add_special_tokens=False))
        return ThinkingFormat(False, self.options.thinking_budget, end_ids, marks)

    @cached_property
    def _ending(self) -> str:
        """What the template writes behind the last turn of a user, where the answer begins."""
        return self._behind_trial()

    def _behind_trial(self, *turns: Message) -> str:
        """Return what the template writes behind a user's turn, which `turns` follow; '' if it
        refuses them.
        """
        messages = map(self._renderable, ({"role": "user", "content": _TRIAL}, *turns))
        return self._try_render(*messages, add_generation_prompt=not turns).rpartition(_TRIAL)[2]

    def _render(self, messages: Sequence[Message], **more: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, **more, **self.options.chat_template_kwargs
        )

    def _try_render(self, *messages: Message, **more: bool) -> str:
        """Return the text of messages; '' if the template refuses them."""
        try:
            return self._render(messages, **more)
        except RequestError:
            return ""

    def _renderable(self, message: Message) -> Message:
        """Return a message whose content the template can render: as one part where it knows only
        parts, or joined.
        """
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                "a message of the chat has no role; write {'role': 'user', 'content': '…'}"
            )
        content = message.get("content")
        if isinstance(content, str) and self._reads_parts == "needed":
            return {**message, "content": [{"type": "text", "text": content}]}
        if content is None or isinstance(content, str):
            return message
        if not isinstance(content, Sequence):
            raise RequestError(f"the content of a message is a {type(content).__name__}, not text")
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    f"the chat has a part of type {kind!r}, and flexgen models take text only"
                )
            texts.append(part["text"])
        return message if self._reads_parts else {**message, "content": "\n".join(texts)}

    @cached_property
    def _reads_parts(self) -> Literal["", "known", "needed"]:
        """Whether the template renders a content that is a list of parts, and not its Python
        representation: "needed" if it renders no plain text.
        """
        contents = _TRIAL, [{"type": "text", "text": _TRIAL}]
        plain, listed = (
            self._try_render({"role": "user", "content": content}) for content in contents
        )
        return (
            "needed"
            if _TRIAL in listed and _TRIAL not in plain
            else "known"
            if plain and plain == listed
            else ""
        )


def chat_format(
    tokenizer: Tokenizer, options: ChatOptions, model: str, is_base: bool
) -> ChatFormat:
    """Decide whether plain prompts of a model go through its chat template, and try the template
    once if so.

    model: its name in messages.
    is_base: the catalog or its name says that it is no chat model.
    Raises `UsageError` for a template that is missing or fails, with the way out.
    """
    choice, has_template = options.apply_chat_template, bool(tokenizer.chat_template)
    if choice is True and not has_template:
        raise UsageError(
            f"the tokenizer of {model} has no chat template; leave --chat-template true out, or "
            "put the template of its instruct model beside it as chat_template.jinja"
        )
    if choice is None:
        applied, reason = False, "not asked for"
    elif choice == "auto":
        applied = has_template and not is_base
        reason = f"auto: the tokenizer has {'one' if has_template else 'no chat template'}"
        if has_template and is_base:
            reason = "auto: it is a base model"
    else:
        applied, reason = choice, "asked for" if choice else "switched off"
    decided = ChatFormat(tokenizer, applied, reason, options)
    if applied:
        try:
            if _TRIAL not in decided.render_prompt(_TRIAL):
                raise RequestError("the template leaves the prompt out")
        except RequestError as error:
            ways = ["take --chat-template false"]
            ways += [] if options.system_prompt is None else ["leave the system prompt out"]
            raise UsageError(
                f"the chat template of {model} cannot be used: {error}; {' or '.join(ways)}"
            ) from error
    return decided
