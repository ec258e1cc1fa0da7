"""Shell completion, by the protocol that bash and zsh use, with the installed command."""

import pytest

from flexgen_helm.checkpoint.catalog import CATALOG
from tests.helpers.console_script import run_script


def complete(line):
    """What is offered at the end of a command line."""
    done = run_script(
        _FLEXGEN_HELM_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(line.split(" ")) - 1),
    )
    assert done.code == 0 and not done.err and not done.heavy
    return done.out.split()


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "line, offered",
    [
        ("flexgen-helm run -r x -m 5 --skip-c", ["--skip-completed-runs"]),
        (
            "flexgen-helm run --precision fp16,4bit-",
            ["fp16,4bit-cache", "fp16,4bit-s", "fp16,4bit-weights"],
        ),
        ("flexgen-helm fetch ", list(CATALOG)),
        ("flexgen-helm run --models-to-run flexgen/opt-12", ["flexgen/opt-125m"]),
    ],
)
def test_names_are_offered_without_heavy_imports(line, offered):
    assert set(complete(line)) == set(offered)


def test_the_script_for_a_shell_is_shown():
    # The flag takes the shell's name where the shell is not detected.
    done = run_script("--show-completion", "fish", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.code == 0 and "_FLEXGEN_HELM_COMPLETE" in done.out
