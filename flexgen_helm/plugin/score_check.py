"""The check of a finished run's scores: HELM makes its requests again, and its metrics from the
recorded answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

from helm.benchmark import run as helm_run
from helm.benchmark.adaptation.request_state import RequestState
from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import ExecutionSpec
from helm.benchmark.metrics.metric import MetricResult, create_metric
from helm.benchmark.metrics.metric_service import MetricService
from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner, remove_per_instance_stats_nans, remove_stats_nans
from helm.common.authentication import Authentication
from helm.common.codec import from_json
from helm.common.general import asdict_without_nones
from helm.common.optional_dependencies import OptionalDependencyNotInstalled
from helm.common.request import Request

from flexgen_helm.plugin import registration
from flexgen_helm.plugin.context import PluginContext, get_context, set_context
from flexgen_helm.plugin.convert import parse_request
from flexgen_helm.plugin.helm_patches import METRIC_CLASS
from flexgen_helm.plugin.request_lines import ANSWER, digest_of, request_lines
from flexgen_helm.plugin.sample_blocks import joining_shares
from flexgen_helm.report.run_folder import INSTANCE_STATS_FILE, RUN_FILE, SPEC_FILE, STATE_FILE
from flexgen_helm.report.scores import RunScores, entry_of
from flexgen_helm.report.verification import ScoreCheck, disagreements, leaves, one_line
from flexgen_helm.service.models import ModelArguments
from flexgen_helm.units import count

# Fields of a run spec that decide a score; its name and groups say where HELM shows it.
_SCORING_FIELDS = (
    "scenario_spec",
    "adapter_spec",
    "data_augmenter_spec",
    "metric_specs",
    "annotators",
)
_TOLERANCE = 1e-9  # of sums in another order
_MEASURED_PREFIX = "flexgen_"  # of throughputs, which are no scores
# What is raised by a metric whose model, package or service is not here.
_ABSENCE_ERRORS = (OSError, ImportError, OptionalDependencyNotInstalled)
State = Mapping[str, Any]


class _RequestsMade(Exception):
    """Leaves HELM's runner where it would have requests answered."""


class _NoService(MetricService):
    """Refuses what another model or a service must answer."""

    def _refuse(self, request: Any) -> NoReturn:
        raise ConnectionError("it asks another model or a service")

    check_nudity = compute_clip_score = upload = get_toxicity_scores = make_critique_request = (
        _refuse
    )


def check_scores(run: RunScores, model: ModelArguments) -> ScoreCheck:
    """Compare the requests of a run with those that HELM makes, and its statistics with those of
    its answers.

    model: of the run, as it is here.
    """
    assert run.folder is not None
    check, content = ScoreCheck(), json.loads((run.folder / STATE_FILE).read_bytes())
    previous, context = get_context(), PluginContext(models=get_context().models)
    # Whatever its name: digests in names are of settings that only the run's call knew.
    context.find_model = lambda *_: model  # type: ignore[method-assign]
    # the run has said what HELM says
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        _register_models()
        set_context(context)
        try:
            spec = _run_spec(run, check)
            if spec is not None and not check.differences:
                runner = _runner(run.folder.parent)
                _compare_requests(run, spec, runner, content["request_states"], check)
                if not check.differences:
                    _compare_statistics(run, spec, runner, check)
        finally:
            set_context(previous)
    return check


def state_name(state: State) -> str:
    """Return what a request is of, in words; no two requests of a run are of the same."""
    instance, perturbation = state["instance"], state["instance"].get("perturbation", {})
    parts = {
        "instance": instance["id"],
        "perturbation": json.dumps(perturbation, sort_keys=True) if perturbation else "",
        "trial": state.get("train_trial_index") or "",
        "reference": state.get("reference_index", ""),
        "mode": state.get("request_mode", ""),
        "window": state["request"]["prompt"] if "prompt_token_ids" in state["request"] else "",
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value != "")


@cache
def _register_models() -> None:
    """Have HELM know its models and ours, as its command does."""
    helm_run.register_builtin_configs_from_helm_package()
    helm_run.register_configs_from_directory("prod_env")
    registration.complete_file_deployments()


@cache
def _runner(suite: Path) -> Runner:
    output = str(suite.parent.parent)
    helm_run.set_benchmark_output_path(output)
    spec = ExecutionSpec(None, Authentication(""), "prod_env", parallelism=1, dry_run=True)
    return Runner(
        spec,
        output,
        suite.name,
        skip_instances=False,
        cache_instances=False,
        cache_instances_only=False,
        skip_completed_runs=False,
        exit_on_error=True,
    )


def _run_spec(run: RunScores, check: ScoreCheck) -> RunSpec | None:
    """Return the run spec that HELM makes of the run's entry; None if it makes none.

    check: gets what differs from the recorded spec.
    """
    assert run.folder is not None
    recorded = json.loads((run.folder / SPEC_FILE).read_bytes())
    adapter = recorded["adapter_spec"]
    name = run.name.partition(",groups=")[0]
    entry = run.record.get("entry")
    description = entry or name.replace(adapter["model"].replace("/", "_"), adapter["model"])
    limits = adapter.get("max_eval_instances"), adapter["num_train_trials"]
    try:
        specs = helm_run.run_entries_to_run_specs(
            [RunEntry(description, priority=1, groups=None)], *limits
        )
    except Exception as error:  # of any run spec function
        check.not_checked(f"questions and scores of {run.name}", error)
        return None
    made = next((spec for spec in specs if spec.name == name), None)
    if made is None:
        check.differences.append(f"{run.name}: HELM makes no run of that name of its entry")
        return None
    made_content = json.loads(json.dumps(asdict_without_nones(made)))
    made_content["metric_specs"].append({"class_name": METRIC_CLASS, "args": {}})
    file = f"{run.name}, {SPEC_FILE}"
    if not entry and (differing := disagreements(file, adapter, made_content["adapter_spec"])):
        # The name of a run lacks some of what its entry says of prompts.
        check.not_checked(f"whether HELM asks {run.name} so", differing[0])
        made_content["adapter_spec"] = adapter
        made = replace(made, adapter_spec=from_json(json.dumps(adapter), type(made.adapter_spec)))
    old, new = (
        {key: spec.get(key) for key in _SCORING_FIELDS} for spec in (recorded, made_content)
    )
    check.differences += disagreements(file, old, new)
    if made.annotators:
        check.not_checked(f"judgements of answers in {run.name}", "another model made them")
    return made


def _compare_requests(
    run: RunScores, spec: RunSpec, runner: Runner, states: Sequence[State], check: ScoreCheck
) -> None:
    """Compare questions, references and prompts with those that HELM makes.

    Where the scenario's data is not here, compare their digest with the record's.
    """
    lines = [
        json.dumps(
            {key: value for key, value in state.items() if key not in ANSWER}, sort_keys=True
        )
        for state in states
    ]
    failed = 0
    for state in states:
        result = state["result"]
        if not result["success"]:  # HELM counts it as an empty answer
            failed += 1
            if not result.get("error") or [output["text"] for output in result["completions"]] != [
                ""
            ]:
                check.differences.append(
                    f"{run.name}, {state_name(state)} is marked as failed, and has an answer"
                )
    if failed:
        check.unchecked.append(
            f"{count(failed, 'answer')} of {run.name} that failed, and count as empty"
        )
    try:
        made = _made_again(run, spec, runner)
    except Exception as error:  # of any scenario whose data is not here
        recorded_digest = run.record.get("asked")
        if recorded_digest not in (None, digest_of(lines)):
            check.differences.append(
                f"{run.name}: its questions or references are not those of {RUN_FILE}"
            )
        what = f"questions and references of {run.name}"
        check.not_checked(
            f"{what}, but by the digest in {RUN_FILE}" if recorded_digest else what, error
        )
        return
    recorded = Counter(lines)
    absent = {
        state_name(state): state for state in map(json.loads, (Counter(made) - recorded).elements())
    }
    for line in recorded - Counter(made):
        state = json.loads(line)
        name, number = state_name(state), recorded[line]
        if number > 1 or name not in absent:
            check.differences.append(
                f"{run.name}, {name} is there {number} times, {made.count(line)} as HELM makes it"
            )
        else:
            check.differences += disagreements(f"{run.name}, {name}", state, absent.pop(name))
    check.differences += [f"{run.name}, {name} is missing" for name in absent]


def _made_again(run: RunScores, spec: RunSpec, runner: Runner) -> list[str]:
    """Return the requests that HELM makes, as `request_lines` has them; of a sample those that were
    drawn.
    """
    made: list[RequestState] = []

    def execute(scenario_state: ScenarioState) -> NoReturn:
        made.extend(scenario_state.request_states)
        raise _RequestsMade

    runner.executor.execute = execute
    with suppress(_RequestsMade):
        runner.run_one(spec)
    if sample := run.record.get("sample"):
        shares = joining_shares(
            entry_of(run.name), [(str(state.instance.id), state.instance.split) for state in made]
        )
        drawn = sorted(shares, key=lambda key: shares[key])[: sample["instances"]]
        made = [state for state in made if str(state.instance.id) in drawn]
    return [*request_lines(made)]


def _compare_statistics(run: RunScores, spec: RunSpec, runner: Runner, check: ScoreCheck) -> None:
    """Compare statistics with those that HELM's metrics make of the recorded answers."""
    assert run.folder is not None
    state, made, absent = _scenario_state(run.folder, spec), MetricResult([], []), []
    for metric in spec.metric_specs:
        name = metric.class_name.rpartition(".")[2]
        try:
            service = _NoService(runner.executor.context)
            result = create_metric(metric).evaluate(state, service, runner.eval_cache_path, 1)
        except Exception as error:  # of any metric, for answers that HELM did not write
            if isinstance(error, _ABSENCE_ERRORS) or type(error) is LookupError:  # of nltk
                absent.append(f"{name}: {one_line(error)}")
            else:
                check.differences.append(
                    f"{run.name}: {name} cannot be computed from the answers ({one_line(error)})"
                )
        else:
            made.aggregated_stats.extend(result.aggregated_stats)
            made.per_instance_stats.extend(result.per_instance_stats)
    if check.differences:
        return
    run_stats = {"stats": [*map(asdict_without_nones, remove_stats_nans(made.aggregated_stats))]}
    instance_stats = map(
        asdict_without_nones, remove_per_instance_stats_nans(made.per_instance_stats)
    )
    for file, rows in ("stats.json", [run_stats]), (INSTANCE_STATS_FILE, [*instance_stats]):
        content = json.loads((run.folder / file).read_bytes())
        recorded = _by_name(content if file == INSTANCE_STATS_FILE else [{"stats": content}])
        computed = _by_name(json.loads(json.dumps(rows)))
        if absent and (names := sorted({name.split()[0] for name in recorded.keys() - computed})):
            check.not_checked(f"{', '.join(names)} of {run.name}, {file}", "; ".join(absent))
            recorded = {name: value for name, value in recorded.items() if name in computed}
        check.differences += disagreements(f"{run.name}, {file}", recorded, computed, _TOLERANCE)


def _scenario_state(folder: Path, spec: RunSpec) -> ScenarioState:
    """Return the recorded state; requests of an instance share one object, as metrics need it."""
    text = (folder / STATE_FILE).read_bytes()
    instances: dict[str, Any] = {}
    states = []
    for raw, state in zip(
        json.loads(text)["request_states"], from_json(text, ScenarioState).request_states
    ):
        instance = instances.setdefault(json.dumps(raw["instance"]), state.instance)
        states.append(
            replace(state, instance=instance, request=parse_request(raw["request"], Request))
        )
    return ScenarioState(spec.adapter_spec, states, spec.annotators)


def _by_name(rows: Iterable[State]) -> dict[str, State]:
    """Return the numbers of statistics by name and subject; throughputs are left out."""
    by_name: dict[str, State] = {}
    for row in rows:
        subject = "".join(
            f", {key} {value}" for key, value in row.items() if key not in ("stats", "perturbation")
        )
        for stat in row["stats"]:
            name = " ".join(str(value) for _, value in leaves(stat["name"])) + subject
            if not name.startswith(_MEASURED_PREFIX):
                by_name[name] = {key: value for key, value in stat.items() if key != "name"}
    return by_name
