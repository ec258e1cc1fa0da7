"""The flags of helm-run that `run` lists are HELM's own; what HELM would refuse is refused before
it is imported.
"""

import re

import pytest

from flexgen_helm import cli
from flexgen_helm.cli.helm_flags import HELM_FLAGS, HelmFlag
from flexgen_helm.tiers import MemoryLimits
from tests.helpers.console_script import run_script
from tests.helpers.flags import record_suites


def differences(flags, parser):
    """What the table and HELM's parser say differently of a flag; () for one that is not there."""
    ours = {
        name: (flag.metavar is not None, flag.nargs, flag.type if flag.metavar else str)
        for flag in flags
        for name in flag.names
    }
    theirs = {
        name: (action.nargs != 0, action.nargs or None, action.type or str)
        for name, action in parser._option_string_actions.items()
        if action.dest != "help"
    }
    names = ours.keys() | theirs.keys()
    return {
        name: (ours.get(name, ()), theirs.get(name, ()))
        for name in names
        if ours.get(name) != theirs.get(name)
    }


def test_the_flags_are_those_of_helms_parser():
    from helm.benchmark.run import build_parser

    parser = build_parser()
    assert differences(HELM_FLAGS, parser) == {}
    assert set(differences(HELM_FLAGS[1:], parser)) == {"-r", "--run-entries"}  # missing
    assert set(differences((*HELM_FLAGS, HelmFlag("--invented", None, "")), parser)) == {
        "--invented"
    }
    as_switch = tuple(
        flag._replace(metavar=None) if "--suite" in flag.names else flag for flag in HELM_FLAGS
    )
    assert set(differences(as_switch, parser)) == {"--suite"}


def test_the_defaults_that_are_told_are_helms():
    from helm.benchmark.run import build_parser

    told = {flag.names: re.search(r"Default: ([\w-]+)", flag.help) for flag in HELM_FLAGS}
    actions = {tuple(action.option_strings): action.default for action in build_parser()._actions}
    assert {names: found[1] for names, found in told.items() if found} == {
        names: str(actions[names]) for names, found in told.items() if found
    }


@pytest.mark.parametrize("words, columns", [(("--help",), "100"), (("-r", "x", "-h"), "80")])
def test_the_help_lists_them_beside_the_engine_flags(words, columns):
    shown = run_script("run", *words, COLUMNS=columns)
    assert shown.code == 0 and not shown.heavy
    assert shown.out.index("─ HELM ─") < shown.out.index("─ Engine ─")
    assert "<bool>" not in shown.out and max(map(len, shown.out.splitlines())) <= int(columns)
    listed = {
        word
        for line in shown.out.splitlines()
        for word in line.split()[1:3]
        if word.startswith("-")
    }
    assert {name for flag in HELM_FLAGS for name in flag.names if flag.help} <= listed


@pytest.mark.parametrize("form", [["-m5"], ["--max-eval", "5"], ["-dm", "5"]])
def test_all_forms_that_argparse_knows_are_passed_on_as_they_are(form, monkeypatch):
    calls = record_suites(monkeypatch)
    argv = [*form, "-r", "simple_mcqa:model=flexgen/opt-125m", "gsm", "-ohome", "--of-a-newer-helm"]
    assert cli.main(["run", *form, "--device", "cpu", *argv[len(form) :], "--cpu-memory=1GB"]) == 0
    assert calls == [(argv, {"device": "cpu", "limits": MemoryLimits(cpu=10**9)})]
