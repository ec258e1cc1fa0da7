"""The catalogue of errors: each class says its cause and the next step, with commands and flags
that exist.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser

import pytest
from helm.benchmark.run import add_run_args

from flexgen_helm.cli.app import command_line
from flexgen_helm.errors import FlexgenError
from flexgen_helm.response_cache import ResponseCacheError
from tests.helpers.paths import ROOT
from tests.helpers.scripts import load

CATALOGUE = load(ROOT / "docs" / "errors.py")
CLASSES = list(CATALOGUE.classes())


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_a_class_says_its_cause_and_the_next_step(error):
    cause, following = CATALOGUE.entry(error)
    assert cause.endswith(".") and following.endswith(".")
    assert error.exit_code in (1, 2, 130)
    commands = command_line().commands
    flags = {
        flag for command in commands.values() for param in command.params for flag in param.opts
    }
    assert set(re.findall(r"`flexgen-helm (\w+)", following)) <= {*commands, "COMMAND"}
    assert set(re.findall(r"--[\w-]+", following)) <= flags | helm_flags() | {"--help"}


def helm_flags() -> set[str]:
    parser = ArgumentParser()
    add_run_args(parser)
    return set(parser._option_string_actions)


def test_errors_of_other_modules_are_there_and_those_of_tests_are_not():
    class Unknown(FlexgenError):
        """No entry of the catalogue."""

    assert (
        ResponseCacheError in CLASSES
        and CLASSES[0] is FlexgenError
        and len(CLASSES) == len(set(CLASSES))
    )
    assert Unknown not in CATALOGUE.classes()
    with pytest.raises(ValueError, match="docstring of Unknown"):
        CATALOGUE.entry(Unknown)
