"""The patches of HELM: what they guard against, and what they leave behind when killed."""

import inspect
import json
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest.mock import Mock

import pytest
from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark import runner as helm_runner
from helm.benchmark import tokenizer_config_registry as tokenizers
from helm.benchmark.executor import Executor, ExecutorError
from helm.benchmark.model_deployment_registry import ClientSpec, ModelDeployment
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.benchmark.runner import Runner
from helm.benchmark.scenarios.simple_scenarios import SimpleMCQAScenario
from helm.benchmark.tokenizer_config_registry import TokenizerConfig, TokenizerSpec
from helm.common.general import ensure_file_downloaded
from helm.common.object_spec import parse_object_spec
from helm.common.request import ErrorFlags, Request

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.cli.run import _print_scores, run_and_show
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.plugin import helm_patches, suite
from flexgen_helm.plugin.client import FlexgenClient
from flexgen_helm.plugin.context import PluginContext
from flexgen_helm.plugin.failures import exit_code_of, explain_failure
from flexgen_helm.plugin.model_settings import ModelSettings
from flexgen_helm.plugin.submission import submission_of
from flexgen_helm.service.models import ModelReader
from tests.helpers.fake_engine import POISON, FakeLoader, fake_context
from tests.helpers.paths import ROOT
from tests.plugin.objects import execution, state

MODEL = "flexgen/opt-125m"
FILES = [
    "run_spec.json",
    "scenario.json",
    "scenario_state.json",
    "stats.json",
    "per_instance_stats.json",
]


@pytest.fixture
def engines(tmp_path, monkeypatch, use_context):
    """A context of its own on fakes; the engines that it loaded."""
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    loader = FakeLoader()
    context = use_context(fake_context(loader))
    yield loader.engines
    context.service.close()


def runner(tmp_path, **changes):
    return Runner(
        execution(tmp_path, **changes), str(tmp_path / "out"), "s", False, False, False, False, True
    )


def run_spec(instances=4):
    (spec,) = construct_run_specs(parse_object_spec(f"simple_mcqa:model={MODEL}"))
    return replace(spec, adapter_spec=replace(spec.adapter_spec, max_eval_instances=instances))


def gsm(name):
    return f"gsm:model=flexgen/{name},follow_format_instructions=instruct"


def request(prompt, **changes):
    return Request(
        model=MODEL, model_deployment=MODEL, prompt=prompt, temperature=0, max_tokens=2, **changes
    )


@pytest.mark.parametrize(
    "bad, says", [({"prompt": POISON}, "not finite"), ({"presence_penalty": 1.0}, "not supported")]
)
def test_a_bad_request_ends_its_run_at_once_and_its_mates_are_kept(engines, tmp_path, bad, says):
    executor, good = Executor(execution(tmp_path, parallelism=1)), request("good")
    with pytest.raises(ExecutorError, match=says):
        executor.execute(state(good, replace(good, **bad)))
    assert executor.execute(state(good)).request_states[0].result.cached


def test_a_client_whose_model_cannot_be_read_fails_at_once(use_context):
    broken = Mock(side_effect=CheckpointError("the tokenizer is damaged"))
    use_context(PluginContext(models=ModelReader("HELM", load_tokenizer=broken)))
    got = FlexgenClient(MODEL).make_request(request("a"))
    assert got.error == "the tokenizer is damaged" and got.error_flags == ErrorFlags(False, True)


@pytest.mark.parametrize(
    "changes, deployment",
    [({"dry_run": True}, None), ({}, "simple/model1"), ({}, "flexgen/unknown-model")],
)
def test_nothing_is_submitted_where_nothing_is_ours(engines, tmp_path, changes, deployment):
    executor = Executor(execution(tmp_path, **changes))
    assert submission_of(executor, state(request("a"), deployment=deployment)) is None
    assert engines == []


# Files


def test_a_run_that_is_killed_between_two_files_is_not_complete(engines, tmp_path, monkeypatch):
    """The same run three times: finished, killed after each number of files, and finished again."""
    bench, spec, real = runner(tmp_path), run_spec(), helm_patches.replace_text
    folder = Path(bench._get_run_path(spec))
    bench.run_one(spec)
    assert {*FILES, "flexgen_run.json"} == {path.name for path in folder.iterdir()}
    for kept in range(len(FILES)):
        written = iter([real] * kept)

        def killed(*given, written=written):
            next(written, Mock(side_effect=KeyboardInterrupt))(*given)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(helm_patches, "replace_text", killed)
            bench.run_one(spec)
        assert not bench._is_run_completed(str(folder))
    bench.run_one(spec)
    assert bench._is_run_completed(str(folder))
    for name in FILES:
        json.loads((folder / name).read_text())
    assert not list(folder.glob(".*"))


def test_without_the_patch_such_a_run_looks_complete(engines, tmp_path):
    """The inverse: HELM's own writer leaves the old last file in place."""
    bench, spec = runner(tmp_path), run_spec()
    folder = bench._get_run_path(spec)
    bench.run_one(spec)
    helm_runner.write.__wrapped__(f"{folder}/run_spec.json", "{}")
    assert bench._is_run_completed(folder)


@pytest.mark.parametrize("is_dry", [False, True])
def test_a_run_without_instances_is_refused(engines, tmp_path, monkeypatch, is_dry):
    """HELM's MMLU passes over the files of a subject that does not exist, and scores nothing."""
    monkeypatch.setattr(SimpleMCQAScenario, "get_instances", lambda self, output_path: [])
    monkeypatch.setattr(SimpleMCQAScenario, "__init__", lambda self, subject: None)
    spec, bench = run_spec(), runner(tmp_path, dry_run=is_dry)
    spec = replace(spec, scenario_spec=replace(spec.scenario_spec, args={"subject": "anatomi"}))
    with pytest.raises(UsageError, match="^no instances to evaluate: check subject=anatomi$"):
        bench.run_one(spec)
    bench.skip_instances = True
    bench.run_one(spec)


def test_runs_of_other_clients_are_left_alone(engines, tmp_path, monkeypatch):
    client = ClientSpec("helm.clients.simple_client.SimpleClient")
    other = ModelDeployment(
        "simple/model1", client, tokenizer_name="simple/tokenizer1", max_sequence_length=2048
    )
    tokenizer = TokenizerConfig(
        "simple/tokenizer1", TokenizerSpec("helm.tokenizers.simple_tokenizer.SimpleTokenizer")
    )
    monkeypatch.setitem(deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT, other.name, other)
    monkeypatch.setitem(tokenizers.TOKENIZER_NAME_TO_CONFIG, tokenizer.name, tokenizer)
    bench, spec = runner(tmp_path), run_spec()
    adapter = replace(spec.adapter_spec, model=other.name, model_deployment=other.name)
    spec = replace(spec, name="other", adapter_spec=adapter)
    bench.run_one(spec)
    folder = Path(bench._get_run_path(spec))
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert "flexgen" not in (folder / "run_spec.json").read_text()


# Guards


@pytest.fixture
def unpatched(monkeypatch, use_context):
    """HELM as it comes, and the warnings that installing the patches gives."""
    warnings = []
    for patch in helm_patches.PATCHES:
        owner, name = patch.owner()
        if hasattr(getattr(owner, name), "flexgen_helm"):
            plain = getattr(owner, name).__wrapped__
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            monkeypatch.setattr(owner, name, staticmethod(plain) if is_static else plain)
    monkeypatch.setattr("flexgen_helm.plugin.context.hwarn", warnings.append)
    use_context(PluginContext())
    return warnings


def test_patches_are_installed_once(unpatched):
    with pytest.raises(ValueError, match="No model metadata"):  # HELM alone does not know the model
        construct_run_specs(parse_object_spec(gsm("opt-13b-paper-4bit")))
    helm_patches.install_or_warn()
    first = Executor.execute, Runner.run_one
    helm_patches.install_or_warn()
    assert (Executor.execute, Runner.run_one) == first and Executor.execute.flexgen_helm
    assert unpatched == []


def run_one_of_tomorrow(self, run_spec, attempt): ...


@pytest.mark.parametrize(
    "owner, name, value",
    [(Runner, "run_one", run_one_of_tomorrow), (helm_runner, "write", 3)],
)
def test_a_helm_that_changed_is_left_untouched_with_one_warning(
    unpatched, monkeypatch, owner, name, value
):
    monkeypatch.setattr(owner, name, value)
    execute = Executor.execute
    helm_patches.install_or_warn()
    helm_patches.install_or_warn()
    assert Executor.execute is execute and getattr(owner, name) is value
    assert len(unpatched) == 1 and "does not know this version of HELM" in unpatched[0]


def test_the_documentation_shows_the_table_of_patches():
    lines = [
        "| in `helm.benchmark` | command | purpose | if it looks different |",
        "|---|---|---|---|",
    ]
    columns = groupby(
        helm_patches.PATCHES,
        lambda patch: f"`{patch.command}` | {patch.purpose} | {patch.fallback}",
    )
    for shown, patches in columns:
        targets = "<br>".join(f"`{patch.target}`" for patch in patches)
        lines.append(f"| {targets} | {shown} |")
    assert "\n".join(lines) + "\n" in (ROOT / "docs" / "developers" / "helm_patches.md").read_text()


@pytest.mark.parametrize(
    "name, is_instruct", [("opt-iml-max-30b-paper-4bit", True), ("opt-30b-paper-4bit", False)]
)
def test_an_expander_reads_the_tags_of_a_model_that_is_looked_up_later(name, is_instruct):
    """Entries as HELM Lite has them, for a model that nothing has looked up before."""
    (spec,) = construct_run_specs(parse_object_spec(gsm(name)))
    assert bool(spec.adapter_spec.global_prefix) == is_instruct


def test_a_helm_that_changed_refuses_suites(unpatched, monkeypatch):
    monkeypatch.setattr(Runner, "run_all", run_one_of_tomorrow)
    arguments = ["-r", f"simple_mcqa:model={MODEL}", "-m", "1", "--suite", "s"]
    outcome = suite.run_suite(arguments)
    assert outcome.exit_code == 2
    (said,) = outcome.sentences
    assert (
        "does not know this version of HELM (runner:Runner.run_all: it takes" in said
        and "pip install" in said
    )


# The suite's small parts


@pytest.mark.parametrize(
    "flags, added",
    [
        ((), ""),
        (("--disable-cache",), " --skip-completed-runs"),
        (("--disable-cache", "--skip-completed-runs"), ""),
    ],
)
def test_the_command_that_goes_on_computes_no_finished_run_again(flags, added, monkeypatch, capsys):
    arguments = ["-r", "simple_mcqa:model=flexgen/opt-125m", "-m", "2", *flags]
    monkeypatch.setattr(sys, "argv", ["flexgen-helm", "run", *arguments])
    monkeypatch.setattr(suite, "run_suite", lambda *_: suite.SuiteOutcome(130, ["interrupted"]))
    assert run_and_show(arguments, {"weights": "dummy"}, verbose=True) == 130
    assert capsys.readouterr().err.endswith(
        f"Go on with:\n  flexgen-helm run {' '.join(arguments)}{added}\n"
    )


def test_a_file_that_cannot_be_downloaded_is_named_with_address_and_place(tmp_path, capsys):
    address, file = (
        "http://127.0.0.1:9/settings.json",
        tmp_path / "scenarios" / "legalbench" / "settings.json",
    )
    file.parent.mkdir(parents=True)

    def make(run_entries, **filters):
        # HELM downloads a file to make its run spec
        if run_entries[0].description.startswith("legalbench"):
            ensure_file_downloaded(address, str(file))
        return [run_spec()]

    own = suite.Suite(ModelSettings())
    mcqa, legal = (
        RunEntry(f"{name},model={MODEL}", 1, None)
        for name in ("simple_mcqa:x=1", "legalbench:subset=a")
    )
    assert own.run_specs(make, [mcqa] * 2) == [run_spec()]
    with pytest.raises(UsageError) as refused:
        own.run_specs(make, [mcqa, legal])
    said, error = str(refused.value), refused.value.__cause__
    assert (
        f"no run of {legal.description} without {address}, which" in said
        and f"Copy it to {file} from" in said
    )
    assert f"could not be downloaded from {address} (" in explain_failure(error, file.parent)
    missing = LookupError("Resource wordnet not found.")  # of a perturbation, or of a metric
    assert explain_failure(missing, file.parent).startswith("the run needs NLTK's 'wordnet'")
    assert explain_failure(missing, None).startswith("all answers are stored, but a metric needs")
    assert exit_code_of(error, file.parent) == 2  # data is missing
    # a metric, a defect
    assert exit_code_of(error, None) == exit_code_of(ValueError("wrong"), file.parent) == 1
    with pytest.raises(UsageError, match=r"no run of simple_mcqa:\S+ \(TypeError: wrong\)$"):
        own.run_specs(Mock(side_effect=TypeError("wrong")), [mcqa])
    capsys.readouterr()
    _print_scores(suite.SuiteOutcome(2, [said], is_dry=True), Path("benchmark_output"))
    assert capsys.readouterr() == ("", "")  # of a dry run that made nothing
