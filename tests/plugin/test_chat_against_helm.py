"""The token ids that our client feeds equal those that HELM's Hugging Face client feeds, for every
class of models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from helm.clients.huggingface_client import HuggingFaceClient
from helm.common.cache import BlackHoleCacheConfig
from helm.common.request import Request
from helm.proxy.retry import NonRetriableException
from helm.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.plugin.context import PluginContext
from flexgen_helm.plugin.convert import to_helm_request
from flexgen_helm.service.models import ModelArguments, ModelFacts, ModelReader
from tests.helpers.chat_models import CHAT_MODELS, ChatModel

TEXTS = [
    "Is 24 even?\nAnswer:",
    "  leading and trailing  ",
    "naïve café 世界 👍\n\n",
    "Hello the 1998 cat's.\t",
    "def f():\n    return 1\n",
    "a" * 300,
    "<|im_end|> </think> <bos> ends turns",
]
SHOTS = "The following are questions.\n\nQuestion: 1 + 1?\nAnswer: 2\n\nQuestion: "
PLAIN = Request(model="acme/m", model_deployment="acme/m", temperature=0, max_tokens=5)


def _turns(text):
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": text},
    ]


KINDS = {
    "plain": lambda text: replace(PLAIN, prompt=text),
    "few-shot": lambda text: replace(PLAIN, prompt=f"{SHOTS}{text}\nAnswer:"),
    "chat": lambda text: replace(PLAIN, messages=_turns(text)),
    "system": lambda text: replace(
        PLAIN, messages=[{"role": "system", "content": "Be brief."}, *_turns(text)]
    ),
    "parts": lambda text: replace(
        PLAIN,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": part} for part in (text, "Thanks.")],
            }
        ],
    ),
    "echo": lambda text: replace(PLAIN, prompt=text, echo_prompt=True, max_tokens=0),
    "stop": lambda text: replace(PLAIN, prompt=text, stop_sequences=["\n", "Question:"]),
    "several": lambda text: replace(PLAIN, prompt=text, temperature=0.7, num_completions=5),
}


@dataclass
class Pair:
    """Both clients on one folder."""

    model: ChatModel
    arguments: ModelArguments
    context: PluginContext
    helm: HuggingFaceClient
    helm_decides: bool

    def ours(self, request):
        return list(
            to_helm_request(request, self.arguments, self.context.models).request.prompt_token_ids
            or ()
        )

    def theirs(self, request):
        """What `HuggingFaceServer.serve_request` feeds."""
        prompt = self.helm.get_prompt(request)
        with self.helm._wrapped_tokenizer as tokenizer:
            return [
                int(i)
                for i in tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)[
                    "input_ids"
                ][0]
            ]


@pytest.fixture(scope="module", params=CHAT_MODELS)
def pair(request, tmp_path_factory):
    model = CHAT_MODELS[request.param]
    folder = model.write(tmp_path_factory.mktemp("chat") / model.name)
    context = PluginContext(
        models=ModelReader(
            "HELM",
            read_facts=lambda model: ModelFacts(model.name, 4096, 1, False, _is_base(model.name)),
        )
    )
    tokenizer = HuggingFaceTokenizer(BlackHoleCacheConfig(), f"chat/{model.name}", str(folder))
    # HELM's client takes any template for a chat model's, and asks to be told of base models like
    # this.
    asked = False if model.template is not None and not model.applied else None
    helm = HuggingFaceClient(
        BlackHoleCacheConfig(), tokenizer, str(folder), apply_chat_template=asked
    )
    yield Pair(
        model, ModelArguments(model.name, str(folder)), context, helm, helm._apply_chat_template
    )


def _is_base(name):
    from flexgen_helm.checkpoint.names import resolve

    return resolve(name.removeprefix("acme--") if name == "gpt2" else name).is_base


@pytest.mark.fast(24)
@pytest.mark.parametrize(
    "kind, text", [*(("plain", text) for text in TEXTS), *((kind, TEXTS[0]) for kind in KINDS)]
)
def test_the_ids_are_those_of_helms_client(pair, kind, text):
    model, request = pair.model, KINDS[kind](text)
    if (request.messages and model.template is None) or (kind == "system" and not model.has_system):
        with pytest.raises(
            NonRetriableException, match="no chat template|System role not supported"
        ):
            pair.ours(request)
        with pytest.raises(Exception, match="not supported"):
            pair.theirs(request)
        return
    ours, helm = pair.ours(request), pair.helm
    is_rendered = bool(request.messages) or (model.applied and kind != "echo")
    # HELM's client also puts scored prompts through the template, so that scores are of another
    # text.
    helm._apply_chat_template = is_rendered
    # HELM's client fails, or feeds the list as Python writes it
    if kind == "parts" and not model.knows_parts:
        parts = request.messages[0]["content"]
        request = replace(
            request,
            messages=[{"role": "user", "content": "\n".join(part["text"] for part in parts)}],
        )
    theirs = pair.theirs(request)
    if is_rendered and model.doubles_bos:
        assert theirs[0] == theirs[1]
        theirs = theirs[1:]
        assert ours[0] != ours[1]
    assert ours == theirs


@pytest.mark.fast(2)
@given(text=st.text(max_size=80))
def test_the_ids_are_those_of_helms_client_for_any_text(pair, text):
    pair.helm._apply_chat_template = pair.model.applied
    request = KINDS["plain"](text)
    theirs = pair.theirs(request)
    assert pair.ours(request) == theirs[1 if pair.model.doubles_bos else 0 :]


def test_what_helms_client_decides_by_itself_is_what_auto_decides(pair):
    assert (
        pair.context.models.chat(pair.arguments).applied == pair.model.applied == pair.helm_decides
    )
