"""The exchange of a process that has the whole model: its own values come back, and nothing else can be asked."""

from __future__ import annotations

import pytest
import torch

from flexgen_helm.engine.exchange import Exchange
from flexgen_helm.engine.pipeline import CloseEngine, Pipeline
from flexgen_helm.errors import FlexgenError
from flexgen_helm.hardware.process_state import Rank

HIDDEN = torch.zeros(2, 3)


def test_a_whole_model_is_exchanged_with_nobody():
    exchange, own = Exchange(), {"layers": [0, 4]}
    assert exchange.is_whole and exchange.rank.size == 1
    with exchange.command(CloseEngine(0)):
        assert exchange.agree(own) == [own]
    exchange.send_values([0.5])
    exchange.flush()
    exchange.fail(FlexgenError("the end"))
    assert exchange.record(1, own) == {}, "the record of a run without ranks says nothing of them"


def test_an_error_of_the_only_rank_is_raised_as_it_is():
    error = FlexgenError("no room")
    with pytest.raises(FlexgenError) as raised:
        Exchange().agree(error)
    assert raised.value is error


@pytest.mark.parametrize(
    "ask",
    [
        lambda exchange: exchange.send_hidden(7, HIDDEN, torch.zeros(2)),
        lambda exchange: exchange.receive_hidden(7, (2, 3), torch.float32, torch.device("cpu")),
        lambda exchange: exchange.receive_values(1),
    ],
)
def test_stages_of_another_process_are_refused(ask):
    with pytest.raises(AssertionError, match="no other process"):
        ask(Exchange())


def test_a_pipeline_answers_all_that_is_asked_of_an_exchange():
    """What a pipeline left to its base would do nothing, and the other ranks would wait for it."""
    asked = {name for name, own in vars(Exchange).items() if callable(own) and not name.startswith("_")}
    assert asked == {"command", "agree", "send_hidden", "receive_hidden", "send_values", "receive_values", "flush",
                     "fail", "record"}  # fmt: skip
    assert asked <= vars(Pipeline).keys()
    assert not Exchange(Rank(0, 2, 0, 1)).is_whole
