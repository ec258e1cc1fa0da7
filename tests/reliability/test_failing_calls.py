"""One system call of a command fails: its result is right, or a sentence says which file and what
helps.
"""

from __future__ import annotations

import pytest

from tests.helpers.failing_commands import COMMANDS, FailingCalls, compiled
from tests.helpers.killed_suites import Suites, pickled_model
from tests.helpers.shares import IS_WHOLE


@pytest.fixture(scope="module")
def suites(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    if (library := compiled(folder)) is None:
        pytest.skip("no C compiler here, so no call can be made to fail")
    with Suites(folder, pickled_model(folder / "model"), library) as suites:
        yield suites


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_call_that_fails_costs_no_result(suites, command):
    failing = FailingCalls(suites, command)
    faults = failing.faults(2)
    if not IS_WHOLE:
        faults = [*{fault.kind: fault for fault in faults}.values()][
            : None if command == "run" else 4
        ]
    tried = {str(fault): failing.try_one(fault) for fault in faults}
    wrong = {fault: (said, outcome.output) for fault, (outcome, said) in tried.items() if said}
    assert not [fault for fault, (said, _) in wrong.items() if said != "not reached"], wrong
    # Other threads come first, and temporary files have other names; of four faults two say little.
    assert len(wrong) <= len(faults) // (5 if command == "run" else 2)
    if command == "run":
        assert sum(failing.calls.values()) > 400 and len(failing.calls) > 150
