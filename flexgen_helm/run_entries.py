"""Run entries of HELM (`mmlu:subject=anatomy,model=flexgen/opt-6.7b`), read and checked before HELM is imported.

A check never refuses what HELM would run. It knows the run specs of HELM and of this package by their source files.
"""

from __future__ import annotations

import ast
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.fetch import local_weights
from flexgen_helm.checkpoint.names import (
    CATALOG,
    PREFIX,
    ResolvedModel,
    base_name,
    is_hub_name,
    known_names,
    naming_advice,
    resolve,
)
from flexgen_helm.errors import UsageError
from flexgen_helm.files import closest, listed, question

# By name, because importing the class would bring HELM's client machinery into every registration.
CLIENT_CLASS = "flexgen_helm.plugin.client.FlexgenClient"
# As HELM looks for one; `model_deployment=` alone is not enough.
_NAMES_A_MODEL = re.compile(r"\bmodel=\b")
_RUN_SPEC = re.compile(r"^@run_spec_function\(\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_RUN_EXPANDER = re.compile(r"^    name = [\"']([^\"']+)[\"']", re.MULTILINE)
# An entry of a .conf file as HELM and we write them; a line that begins with '#' is a comment.
_CONF_ENTRY = re.compile(r"^\s*\{?\s*\"?description\"?\s*[:=]\s*\"([^\"\\$]+)\"\s*[,}\n]", re.MULTILINE)


def read_conf(path: Path) -> list[str]:
    """Return the run entries of a .conf file, as far as each is written on a line of its own."""
    return _CONF_ENTRY.findall(path.read_text(encoding="utf-8"))


def parse(run_entry: str) -> tuple[str, dict[str, str]]:
    """Return the name and the arguments of a run entry, as HELM reads it. Raises `UsageError`."""
    name, colon, rest = run_entry.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if colon else []
    for key, equals, _ in pairs:
        if not equals:
            raise UsageError(f"the run entry {run_entry!r} has {key!r} where key=value is expected")
    return name, {key: value for key, _, value in pairs}


def without_model(run_entry: str) -> str:
    """Return the entry without its model."""
    scenario, arguments = parse(run_entry)
    kept = [f"{key}={value}" for key, value in arguments.items() if key not in ("model", "model_deployment")]
    return f"{scenario}:{','.join(kept)}" if kept else scenario


def check_entries(
    run_entries: Sequence[str],
    models: Sequence[str],
    *,
    local_path: Path = Path("prod_env"),
    has_plugins: bool = False,
    needs_weights: bool = True,
) -> None:
    """Raise `UsageError` with one sentence for the first run entry or model that HELM could not run.

    run_entries: those that HELM would expand.
    models: of --models-to-run.
    local_path: folder of HELM's model_deployments.yaml, whose names are the user's own.
    has_plugins: flags of HELM's name modules or models that register what is not known here.
    needs_weights: False with dummy weights.
    """
    own_deployments = _deployments(local_path)
    has_plugins = has_plugins or _has_other_plugins()
    names = list(models)
    for run_entry in run_entries:
        named = parse(run_entry)[1].get("model", "")
        if named.startswith(("/", ".", "~")):
            raise UsageError(naming_advice(named))
    if run_entries and not models and not any(map(_NAMES_A_MODEL.search, run_entries)):
        first = run_entries[0]
        raise UsageError(
            f"the run entry {first!r} names no model: write {first}{',' if parse(first)[1] else ':'}model={PREFIX}"
            f"{WHEEL_MODEL}, or another name that `flexgen-helm models` lists"
        )
    for run_entry in run_entries:
        scenario, arguments = parse(run_entry)
        if not has_plugins:
            _check_scenario(scenario)
        model = arguments.get("model", "")
        if not models and not has_plugins and model not in own_deployments:
            _check_prefix(run_entry, model)
        names += [model, arguments.get("model_deployment", "")]
    for name in dict.fromkeys(names):
        if name in own_deployments:
            if (path := own_deployments[name]) is not None and needs_weights:
                _check_weights(resolve(path))
        elif name.startswith(PREFIX):
            resolved = _resolve(name.removeprefix(PREFIX))
            if needs_weights:
                _check_weights(resolved)
    for run_entry in () if has_plugins else run_entries:
        _check_scenario_arguments(run_entry)


def check_arguments(given: Namespace, *, needs_weights: bool = True) -> list[str]:
    """Check all run entries and models of the arguments of `helm-run`; returns the hints for them.

    given: those that `cli.helm_flags` parsed. What an unusual .conf file says is left to HELM.
    Raises `UsageError` as `check_entries` does.
    """
    run_entries = given_entries(given)
    check_entries(
        run_entries,
        given.models_to_run or [],
        local_path=Path(given.local_path or "prod_env"),
        has_plugins=bool(given.plugins or given.enable_huggingface_models or given.enable_local_huggingface_models),
        needs_weights=needs_weights,
    )
    files = [Path(path) for path in given.conf_paths or ()] if given.priority is None else []
    return [f"-c {file} is the shipped file" for file in files if not file.exists()] + hints(run_entries)


def given_entries(given: Namespace) -> list[str]:
    """Return the run entries of the arguments of `helm-run`. Raises `UsageError` for a file that does not exist."""
    run_entries = [*(given.run_specs or ()), *(given.run_entries or ())]
    if given.priority is None:  # else HELM leaves entries out
        for path in map(Path, given.conf_paths or ()):
            found = conf_file(path)
            with suppress(OSError, ValueError):  # HELM says why it cannot be read
                run_entries += read_conf(found)
                if not re.search(r"\b(entries|include)\b", found.read_text(encoding="utf-8")):
                    raise UsageError(
                        f"-c {path} has no run entries; `flexgen-helm entries` lists some, and a file that names "
                        "models goes into FLEXGEN_HELM_MODELS"
                    )
    return run_entries


def conf_file(path: Path) -> Path:
    """Return the file that -c names: `runs/quickstart.conf` is the shipped one where no such file is here.

    Raises `UsageError` where there is neither.
    """
    if path.exists():
        return path
    shipped = {file.name: file for folder in _folders("flexgen_helm.runs") for file in folder.glob("*.conf")}
    if path.name in shipped and path.parent in (Path(), Path("runs")):
        return shipped[path.name]
    close = [f"runs/{name}" for name in closest(path.name, shipped)]
    advice = f"did you mean {listed(close)}?" if close else f"shipped are runs/{', '.join(sorted(shipped))}"
    raise UsageError(f"-c {path}: there is no such file; {advice}")


def given_models(given: Namespace) -> list[ResolvedModel]:
    """Return our models that the arguments of `helm-run` name; none whose names the user's own files define."""
    own = _deployments(Path(given.local_path or "prod_env"))
    named = [*(given.models_to_run or ()), *(parse(entry)[1].get("model", "") for entry in given_entries(given))]
    names = [name for name in dict.fromkeys(named) if name.startswith(PREFIX) and name not in own]
    return [_resolve(name.removeprefix(PREFIX)) for name in names]


def hints(run_entries: Sequence[str]) -> list[str]:
    """Return a sentence for each model that is none of ours, with our name for it if there is one."""
    repositories = {entry.hub_repo: entry.name for entry in CATALOG.values() if entry.hub_repo}
    models = dict.fromkeys(parse(run_entry)[1].get("model", "") for run_entry in run_entries)
    return [
        f"model={model} is computed by HELM's own client"
        + (f"; write model={PREFIX}{repositories[model]} for flexgen_helm" if model in repositories else "")
        for model in models
        if "/" in model and not model.startswith(PREFIX)
    ]


@cache
def run_spec_names() -> frozenset[str]:
    """Return the names of all run specs of HELM and of this package; empty if HELM is not installed."""
    return frozenset(_run_spec_files())


@cache
def own_run_specs() -> frozenset[str]:
    """Return the names of the run specs of this package."""
    ours = set(_folders("flexgen_helm.scenarios"))
    return frozenset(name for name, file in _run_spec_files().items() if ours & set(file.parents))


@cache
def _run_spec_files() -> dict[str, Path]:
    """Return run spec -> the file that defines it."""
    found: dict[str, Path] = {}
    helm, ours = _folders("helm"), _folders("flexgen_helm.scenarios")
    for folder in [folder / "benchmark" / "run_specs" for folder in helm] + ours if helm and ours else []:
        for file in folder.rglob("*.py"):
            found |= dict.fromkeys(_RUN_SPEC.findall(file.read_text(encoding="utf-8")), file)
    return found


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


@cache
def _run_expanders() -> frozenset[str]:
    """Return the arguments that every run spec of HELM takes; empty if they are not found."""
    files = [folder / "benchmark" / "run_expander.py" for folder in _folders("helm")]
    return frozenset(
        name for file in files if file.is_file() for name in _RUN_EXPANDER.findall(file.read_text(encoding="utf-8"))
    )


def _check_scenario_arguments(run_entry: str) -> None:
    """Refuse an entry that lacks an argument of its run spec, or has one that does not exist."""
    scenario, given = parse(run_entry)
    file, expanders = _run_spec_files().get(scenario), _run_expanders()
    function = None if file is None else _function(file, scenario)
    if function is None or not expanders:
        return
    parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = [parameter.arg for parameter in parameters]
    positional = names[: len(names) - len(function.args.kwonlyargs)]
    required = positional[: len(positional) - len(function.args.defaults)]
    required += [
        parameter.arg
        for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults)
        if default is None
    ]
    unknown = [key for key in given if key not in names and key not in expanders]
    if unknown and function.args.kwarg is None:
        meant = question(unknown[0], [*names, *(expanders if len(unknown[0]) > 2 else ())])
        raise UsageError(
            f"the run entry {run_entry!r} has {unknown[0]!r}, which {scenario} does not take; {meant}it takes "
            f"{', '.join(names) or 'no arguments of its own'}"
        )
    missing = [name for name in required if name not in given]
    if missing:
        added = ",".join(f"{name}=…" for name in missing)
        rest = run_entry.partition(":")[2]
        raise UsageError(
            f"the run entry {run_entry!r} lacks {' and '.join(missing)}: write {scenario}:{added}"
            f"{',' if rest else ''}{rest}; `flexgen-helm entries {scenario} --all` lists entries"
        )


@cache
def _function(file: Path, scenario: str) -> ast.FunctionDef | None:
    """Return the function that makes a run spec; None where its source is written in another way."""
    with suppress(OSError, SyntaxError):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(call, ast.Call) and any(getattr(argument, "value", "") == scenario for argument in call.args)
                for call in node.decorator_list
            ):
                return node
    return None


def _check_scenario(name: str) -> None:
    known = run_spec_names() | _registered()
    if name in known or not known:
        return
    raise UsageError(
        f"the scenario {name!r} is not known; {question(name, known)}`flexgen-helm entries` lists run entries"
    )


def _registered() -> frozenset[str]:
    """Return the run specs that are registered in this process, by whatever module."""
    return frozenset(getattr(sys.modules.get("helm.benchmark.run_spec"), "_REGISTERED_RUN_SPEC_FUNCTIONS", ()))


def _has_other_plugins() -> bool:
    return any(point.value.partition(".")[0] != "flexgen_helm" for point in entry_points(group="helm"))


def _check_prefix(run_entry: str, model: str) -> None:
    """Refuse a name of ours without `flexgen/`. All names of HELM have a slash, but for groups such as `text`."""
    if "/" not in model and {model, base_name(model)} & set(known_names().values()):
        raise UsageError(f"the model {model!r} of {run_entry} needs a prefix: write model={PREFIX}{model}")


def _resolve(short: str) -> ResolvedModel:
    # `flexgen-helm run` writes org/repo as org--repo, whatever folders there are.
    if "/" in short and not is_hub_name(short):
        raise UsageError(naming_advice(short))
    return resolve(short.replace("/", "--"))


def _check_weights(model: ResolvedModel) -> None:
    """Refuse a folder without weights; what the hub has is not asked."""
    if model.path is not None and model.arguments.get("weights") != "dummy":
        local_weights(model)


def _deployments(folder: Path) -> dict[str, str | None]:
    """Return the names in the user's deployment file that mean more than the name itself says, and paths of models."""
    try:
        content = yaml.safe_load((folder / "model_deployments.yaml").read_text(encoding="utf-8"))
        return dict(pair for entry in content["model_deployments"] for pair in _names_of(entry))
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}  # HELM says what is wrong with it


def _names_of(entry: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    is_ours, arguments = entry["client_spec"]["class_name"] == CLIENT_CLASS, entry["client_spec"].get("args") or {}
    # An entry of ours without a path or another name, as `flexgen-helm run` writes them, is looked up by its name.
    if not is_ours or arguments.get("path") or entry.get("model_name"):
        has_weights = is_ours and arguments.get("path") and arguments.get("weights") != "dummy"
        path = str(arguments["path"]) if has_weights else None
        yield entry["name"], path
        if entry.get("model_name"):
            yield entry["model_name"], path
