"""LAMBADA's accuracy, whichever way a client writes its tokens."""

from types import SimpleNamespace

import pytest
from helm.benchmark.scenarios.scenario import CORRECT_TAG, Input, Instance, Output, Reference
from helm.common.request import GeneratedOutput, RequestResult, Token
from helm.common.tokenization_request import TokenizationToken

from flexgen_helm.scenarios.metrics import LambadaAccuracyMetric


class Service:
    """A tokenizer of words that writes a leading space as byte-level vocabularies do."""

    def encode(self, text):
        return SimpleNamespace(
            tokens=[TokenizationToken(index) for index, _ in enumerate(text.split())]
        )

    def tokenize(self, text):
        return ["Ġ" + word if index else word for index, word in enumerate(text.split())]

    def decode(self, tokens):
        return " fox" if tokens[0].value == 3 else "?"


@pytest.mark.parametrize(
    "token, accuracy", [("Ġfox", 1.0), (" fox", 1.0), ("fox", 0.0), (" dog", 0.0)]
)
def test_a_last_word_is_found_in_either_spelling(token, accuracy):
    reference = Reference(Output(" fox"), [CORRECT_TAG])
    completion = GeneratedOutput(text=token, logprob=-1.0, tokens=[Token(token, -1.0)])
    state = SimpleNamespace(
        instance=Instance(Input("the quick brown"), [reference], id="1"),
        request=SimpleNamespace(max_tokens=1),
        result=RequestResult(success=True, embedding=[], completions=[completion], cached=False),
    )
    assert LambadaAccuracyMetric().sums([state], Service()) == {"exact_match": accuracy}
