"""Tokenizers of each class of models, with the chat templates that such models publish, in
short.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.tokenizers_by_family import FAMILIES

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: the answer begins in thinking unless it is switched off; knows lists of parts.
THINKING = (
    "{% for m in messages %}{% set text = m.content if m.content is string else m.content | "
    "map(attribute='text') | join('\n') %}"
    "{{ '<|im_start|>' + m.role + '\n' + text.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}"
)
# As Gemma 2's: BOS in the template, and no system role.
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor "
    "%}{{ '<start_of_turn>model\n' }}"
)
# Thinks if it is told to; every tokenizer can write it.
TURNS = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "[assistant] {% if think is defined %}<think>{% endif %}"
)
PLAIN_TURNS = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
)


def add_template(model: Path, folder: Path, template: str = TURNS) -> Path:
    """Copy a model's folder, with a template."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@dataclass(frozen=True)
class ChatModel:
    """A class of models.

    name: of a model of this class, by which base models are known.
    applied: what `auto` decides.
    doubles_bos: template and tokenizer write BOS both, so that HELM's client feeds two.
    """

    name: str
    family: str
    template: str | None
    applied: bool = True
    has_system: bool = True
    knows_parts: bool = False
    doubles_bos: bool = False

    def write(self, folder: Path) -> Path:
        FAMILIES[self.family].write(folder)
        config = {**FAMILIES[self.family].config, "tokenizer_class": "PreTrainedTokenizerFast"}
        if self.template is not None:
            config["chat_template"] = self.template
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder


CHAT_MODELS = {
    "base": ChatModel("gpt2", "gpt2", None, applied=False),
    "base with a template": ChatModel("acme--Qwen2.5-0.5B", "qwen2", CHATML, applied=False),
    "instruct": ChatModel("acme--SmolLM2-135M-Instruct", "qwen2", CHATML),
    "thinking": ChatModel("acme--Qwen3-0.6B", "qwen2", THINKING, knows_parts=True),
    "without system role": ChatModel(
        "acme--gemma-2-2b-it", "gemma2", NO_SYSTEM, has_system=False, doubles_bos=True
    ),
    "BOS by the tokenizer": ChatModel("acme--llama-3-chat", "llama3", PLAIN_TURNS),
}
