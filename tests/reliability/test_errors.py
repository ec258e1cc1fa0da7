"""The catalogue of errors: each class says its cause and the next step, and commands in it exist."""

from __future__ import annotations

import inspect
import re

import pytest
from typer.main import get_command

from flexgen_helm import errors
from flexgen_helm.cli.app import app
from flexgen_helm.errors import FlexgenError

CLASSES = [own for own in vars(errors).values() if inspect.isclass(own) and issubclass(own, FlexgenError)]


@pytest.mark.parametrize("error", [own for own in CLASSES if own is not FlexgenError], ids=lambda own: own.__name__)
def test_a_class_says_its_cause_and_the_next_step(error):
    cause, _, following = inspect.getdoc(error).partition("\n\nNext: ")
    assert cause.endswith(".") and "\n" not in cause and following.endswith(".")
    assert error.exit_code in (1, 2, 130)
    commands = get_command(app).commands
    assert set(re.findall(r"`flexgen-helm (\w+)", following)) <= {*commands, "COMMAND"}


def test_there_are_all_of_them():
    assert len(CLASSES) == 15 and issubclass(errors.DiskFullError, errors.OffloadError)
