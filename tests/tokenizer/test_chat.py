"""Which prompts get a chat template, how messages become text, and how often BOS is there."""

from copy import copy
from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers.utils import chat_template_utils

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.checkpoint.planned_weights import read_model_config
from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.request import GenerationRequest, ThinkingFormat, ThinkingMarks
from flexgen_helm.scheduling.prepare import prepare
from flexgen_helm.tokenizer.chat import ChatOptions, chat_format
from flexgen_helm.tokenizer.tokenizer import Tokenizer
from tests.helpers.chat_models import CHAT_MODELS, CHATML


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    loaded = {}
    for name, model in CHAT_MODELS.items():
        tokenizer = Tokenizer.from_path(model.write(tmp_path_factory.mktemp("chat") / "model"))
        assert tokenizer is not None
        loaded[name] = tokenizer
    return loaded


def decide(tokenizer, choice="auto", is_base=False, **options):
    return chat_format(tokenizer, ChatOptions(choice, **options), "acme", is_base)


def replace_template(tokenizer, template):
    changed = copy(tokenizer)
    changed.chat_template = template
    return changed


class Template:
    """A tokenizer that has only a template."""

    def __init__(self, render):
        self.chat_template, self._render = "yes", render

    def apply_chat_template(self, messages, **variables):
        return str(self._render(messages))


# The decision


@pytest.mark.parametrize(
    "name, choice, is_base, applied, reason",
    [
        ("instruct", "auto", False, True, "auto: the tokenizer has one"),
        ("instruct", "auto", True, False, "auto: it is a base model"),
        ("instruct", True, True, True, "asked for"),
        ("instruct", False, False, False, "switched off"),
        ("instruct", None, False, False, "not asked for"),
        ("base", "auto", False, False, "auto: the tokenizer has no chat template"),
        ("base", "auto", True, False, "auto: the tokenizer has no chat template"),
    ],
)
def test_the_decision_and_its_reason(tokenizers, name, choice, is_base, applied, reason):
    decided = decide(tokenizers[name], choice, is_base)
    assert (decided.applied, decided.reason) == (applied, reason)


BASE = """smollm2-135m qwen3-8b-base-4bit gemma-3-1b-pt-no-template Qwen/Qwen2.5-7B HuggingFaceTB/SmolLM3-3B-Base
    chat-lab/model-pt"""
INSTRUCT = """smollm2-135m-instruct-q4_1 Qwen/Qwen3-8B Qwen/Qwen2.5-7B-Instruct-1M Qwen/Qwen1.5-0.5B-Chat Qwen--QwQ-32B
    HuggingFaceTB/SmolLM3-3B acme/unknown"""


@pytest.mark.parametrize("names, is_base", [(BASE, True), (INSTRUCT, False)])
def test_base_models_are_known_by_catalog_or_name(names, is_base):
    assert {name: resolve(name).is_base for name in names.split()} == dict.fromkeys(
        names.split(), is_base
    )


def test_a_template_that_is_missing_or_fails_says_so_by_name(tokenizers):
    system = {"system_prompt": "Be brief."}
    leaves_out = Template(lambda messages: messages[-1]["content"])
    broken = replace_template(tokenizers["instruct"], "{{ messages[7].content.nothing }}")
    unusable = "chat template of acme cannot be used.*--chat-template false"
    for tokenizer, choice, options, message in (
        (
            tokenizers["base"],
            True,
            {},
            "tokenizer of acme has no chat template; leave --chat-template true out",
        ),
        (
            tokenizers["without system role"],
            "auto",
            system,
            "cannot be used: .*System role.*leave the system prom",
        ),
        (leaves_out, "auto", system, "leaves the system prompt out; take --chat-template false"),
        (broken, "auto", {}, unusable),
        (broken, True, {}, unusable),
    ):
        with pytest.raises(UsageError, match=message):
            decide(tokenizer, choice, **options)
    assert not decide(broken, False).applied  # tried only where it is needed
    assert not decide(tokenizers["without system role"], False, **system).applied


# Rendering


def test_kwargs_reach_the_template_and_win_over_special_tokens(tokenizers):
    thinking = decide(tokenizers["thinking"]).render_prompt("Hi")
    answering = decide(
        tokenizers["thinking"], chat_template_kwargs={"enable_thinking": False}
    ).render_prompt("Hi")
    assert thinking.endswith("<think>\n") and answering == thinking + "\n</think>\n\n"
    own_bos = decide(tokenizers["without system role"], chat_template_kwargs={"bos_token": "<eos>"})
    assert own_bos.render_prompt("Hi").startswith("<eos><start_of_turn>user\nHi")


def test_a_system_prompt_goes_in_front_of_chats_that_have_none(tokenizers):
    decided = decide(tokenizers["instruct"], system_prompt="Be brief.")
    user = {"role": "user", "content": "Hi"}
    system_turn = {"role": "system", "content": "Be long."}
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    plain = decide(tokenizers["instruct"])
    assert (
        decided.render_prompt("Hi")
        == decided.render_messages([user])
        == system + plain.render_messages([user])
    )
    assert decided.render_messages([system_turn, user]) == plain.render_messages(
        [system_turn, user]
    )


PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
}


def test_parts_of_text_are_joined_where_the_template_knows_only_text(tokenizers):
    for name in ("instruct", "thinking", "BOS by the tokenizer"):
        decided = decide(tokenizers[name])
        assert decided.render_messages([PARTS]) == decided.render_prompt("one\ntwo")
    seen = []
    decide(Template(lambda messages: seen.append(messages) or "Hello, the same")).render_messages(
        [PARTS]
    )
    assert seen[-1] == [PARTS]  # handed on as it is


def test_text_becomes_a_part_where_the_template_knows_only_parts(tokenizers):
    """As those of Llava and Idefics do: of text alone they write nothing."""
    template = """{% for m in messages %}[{{ m.role }}]{% for part in m.content if part.type == 'text' %}{{ part.text }}
        {%- endfor %}{% endfor %}[assistant]{% if '</think>' %}<think>{% endif %}"""
    chat = decide(replace_template(tokenizers["instruct"], template), system_prompt="Be brief.")
    assert chat.render_prompt("one") == "[system]Be brief.[user]one[assistant]<think>"
    assert chat.render_messages([PARTS]).endswith("[user]onetwo[assistant]<think>")
    assert chat.thinking(chat.render_prompt("What is </think>?")).begins_inside
    with pytest.raises(UsageError, match="leaves the prompt out; take --chat-template false"):
        decide(
            replace_template(
                tokenizers["instruct"], "{% for m in messages if m.content is none %}{% endfor %}"
            )
        )


@pytest.mark.parametrize(
    "messages, says",
    [
        ([], "at least one message"),
        ([{"content": "Hi"}], "has no role"),
        (["Hi"], "has no role"),
        ([{"role": "user", "content": 7}], "is a int, not text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "'image_url'.*take text only",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
            "'str'.*take text only",
        ),
    ],
)
def test_what_is_no_chat_of_texts_is_refused(tokenizers, messages, says):
    with pytest.raises(RequestError, match=says):
        decide(tokenizers["instruct"]).render_messages(messages)


@given(st.text(max_size=60))
def test_bos_is_there_once_whoever_writes_it(tokenizers, text):
    for name in ("without system role", "BOS by the tokenizer"):
        decided = decide(tokenizers[name])
        ids, bos = tokenizers[name].encode(decided.render_prompt(text)), tokenizers[name].bos_id
        assert ids[0] == bos and ids.count(bos) == 1 + text.count(str(tokenizers[name].bos_text))
    rendered = decide(tokenizers["instruct"]).render_prompt(text)
    assert tokenizers["instruct"].encode(rendered) == tokenizers["instruct"].encode(rendered, False)


def test_only_generating_prompts_are_rendered(tokenizers):
    applied, plain = decide(tokenizers["instruct"]), decide(tokenizers["instruct"], False)
    tokenizer, chat = tokenizers["instruct"], [{"role": "user", "content": "Hi"}]
    config = replace(read_model_config("qwen3-0.6b")[0], vocab_size=1 << 20)
    rendered = applied.render_prompt("Hi")
    assert applied.render(chat, None) == plain.render(chat, None) == rendered
    assert plain.render(None, "Hi") is applied.render(None, None) is None
    for fields, text in (
        ({"max_tokens": 1}, rendered),
        ({"max_tokens": 1, "echo_logprobs": True}, "Hi"),
        ({"max_tokens": 0, "echo_logprobs": True}, "Hi"),
    ):
        request = GenerationRequest(prompt="Hi", **fields)
        (prepared,) = prepare([request], config, tokenizer, None, applied).distinct
        assert prepared.tokens == tokenizer.encode(text)


def test_the_identity_is_of_what_changes_answers_and_not_of_who_asked(tokenizers):
    instruct, thinking = tokenizers["instruct"], tokenizers["thinking"]
    auto = decide(instruct)
    assert auto.identity == decide(instruct, True).identity
    changed = [
        decide(instruct, system_prompt="s"),
        decide(instruct, chat_template_kwargs={"a": 1}),
        decide(thinking),
    ]
    assert len({chat.identity for chat in (auto, *changed)}) == 4
    record = auto.as_json()
    assert (record["applied"], record["reason"], record["kwargs"]) == (True, auto.reason, {})
    assert len(record["template"]) == 12


def test_a_thinking_model_is_known_and_so_is_where_it_begins(tokenizers):
    thinks = decide(tokenizers["thinking"], thinking_budget=7)
    answers = decide(tokenizers["thinking"], chat_template_kwargs={"enable_thinking": False})
    # the model writes <think>
    itself = decide(replace_template(tokenizers["instruct"], f"{CHATML}{{# </think> #}}"))
    end = tuple(tokenizers["thinking"].encode("\n</think>\n\n"))
    for text in ("Hi", "What is <think>?", "<think>", "</think>", "Hello"):
        assert thinks.thinking(thinks.render_prompt(text)) == ThinkingFormat(True, 7, end)
        assert answers.thinking(answers.render_prompt(text)) == ThinkingFormat(False, None, end)
        # whatever the user speaks of
        assert not itself.thinking(itself.render_prompt(text)).begins_inside
    plain = decide(tokenizers["instruct"])
    assert plain.thinking(plain.render_prompt("</think>")) is None


# Thoughts and answer as templates of other kinds write them, the marks, and the end that a spent
# budget writes.
WRITTEN = {
    "tags of its own": (
        "<seed:think>{}</seed:think>\n{}",
        ("<seed:think>", "</seed:think>"),
        "</seed:think>\n",
    ),
    "channels": (
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
        ("<|channel|>", "<|channel|>final<|message|>"),
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "a channel": (
        "<|channel>thought\n{}\n<channel|>{}",
        ("<|channel>", "<channel|>"),
        "\n<channel|>",
    ),
    "around the answer": (
        "<|START_THINKING|>{}<|END_THINKING|><|START_TEXT|>{}<|END_TEXT|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        "<|END_THINKING|><|START_TEXT|>",
    ),
    "recipients": (
        " to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>{}",
        ("to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
        "<|eom|><|start|>assistant to=user<|message|>",
    ),
}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("written, marks, end", WRITTEN.values(), ids=WRITTEN)
def test_marks_of_thinking_are_read_off_the_template(tokenizers, written, marks, end, key):
    """The template joins its marks from parts: its text alone does not have them."""
    before, between, behind = (
        part.replace("<", "<' + '").replace("\n", "\\n") for part in written.split("{}")
    )
    turn = (
        f"{{{{ '{before}' + m.{key} + '{between}' + m.content + '{behind}' if m.{key} else "
        f"m.content }}}}"
    )
    template = f"{{% for m in messages %}}[{{{{ m.role }}}}]{turn}{{% endfor %}}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    chat = decide(replace_template(tokenizers["instruct"], template))
    found = chat.thinking(chat.render_prompt("What is <|channel|>?"))
    assert found is not None and not found.begins_inside
    assert found.marks == ThinkingMarks(*marks)
    assert chat.tokenizer.decode(found.end_ids) == end
    assert chat.as_json()["thinking_marks"] == found.marks and list(marks)[1] in chat.identity
    assert "thinking_marks" not in decide(tokenizers["thinking"]).as_json()
    # The same, where the prompt ends inside.
    inside = template.replace(
        "{% if add_generation_prompt %}[assistant]",
        f"{{% if add_generation_prompt %}}[assistant]{{{{ '{before}' }}}}",
    )
    chat = decide(replace_template(tokenizers["instruct"], inside))
    found = chat.thinking(chat.render_prompt("Hi"))
    assert found is not None and found.begins_inside and found.marks.end == marks[1]


@pytest.mark.parametrize(
    "text, marks",
    [
        ("[THINK] … [/THINK]", ("[THINK]", "[/THINK]")),
        ("◁/think▷", ("◁think▷", "◁/think▷")),
        ("<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")),
        ("<think></think><response>", ("<think>", "</think>", "<response>", "</response>")),
        ("</think> and content.split('<answer>')", ("<think>", "</think>", "<answer>", "</answer>")),
        ("[BEGIN FINAL RESPONSE]", ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", "[BEGIN FINAL RESPONSE]",
                                    "[END FINAL RESPONSE]")),
    ],
)  # fmt: skip
def test_marks_of_thinking_are_known_by_the_text_of_a_template(tokenizers, text, marks):
    tokenizer = replace_template(tokenizers["instruct"], f"{CHATML}{{# {text} #}}")
    found = decide(tokenizer).thinking_format
    assert found is not None and found.marks == ThinkingMarks(*marks)


def test_the_template_goes_before_the_vocabulary(tokenizers):
    tokenizer = copy(tokenizers["instruct"])
    backend = Backend.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    for text, end in (("", "[/THINK]"), ("</think>", "</think>")):
        found = decide(Tokenizer(backend, chat_template=f"{CHATML}{{# {text} #}}")).thinking_format
        assert found is not None and found.marks.end == end


def test_the_date_of_a_template_is_fixed_recorded_and_part_of_the_key(tokenizers):
    """Else a run that goes on after midnight has other prompts than it began with."""
    tokenizer = replace_template(
        tokenizers["instruct"], "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    )
    usual, dated = (
        decide(tokenizer, True),
        decide(tokenizer, True, chat_template_kwargs={"strftime_now": "2026-11-27"}),
    )
    assert (
        usual.render_prompt("x") == "26 Jul 2024: x"
        and dated.render_prompt("x") == "27 Nov 2026: x"
    )
    assert usual.as_json()["date"] == "2024-07-26" and usual.identity != dated.identity
    assert "date" not in decide(tokenizers["instruct"], True).as_json()
    here, there = "{{ strftime_now('%Y') }}", [[{"role": "user", "content": "x"}]]
    assert chat_template_utils.render_jinja_template(there, chat_template=here)[0] == [
        str(datetime.now().year)
    ]
    with pytest.raises(UsageError, match="'tomorrow'; give a date such as 2024-07-26"):
        decide(tokenizer, True, chat_template_kwargs={"strftime_now": "tomorrow"})
