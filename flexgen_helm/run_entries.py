"""Run entries of HELM (`mmlu:subject=anatomy,model=flexgen/opt-6.7b`), read and checked before HELM
is imported.

A check never refuses what HELM would run.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

import yaml

from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL
from flexgen_helm.checkpoint.known_names import known_names
from flexgen_helm.checkpoint.local_files import local_weights
from flexgen_helm.checkpoint.names import ResolvedModel, resolve
from flexgen_helm.checkpoint.naming_advice import naming_advice
from flexgen_helm.checkpoint.suffixes import PREFIX, base_name, is_hub_name
from flexgen_helm.errors import UsageError
from flexgen_helm.run_specs import (
    package_folders,
    run_expander_names,
    run_spec_function,
    run_spec_names,
)
from flexgen_helm.suggestions import closest, listed, question

# By name, because importing the class would bring HELM's client machinery into every registration.
CLIENT_CLASS = "flexgen_helm.plugin.client.FlexgenClient"
# How HELM finds that an entry names a model; `model_deployment=` alone is not enough.
_MODEL_ARGUMENT = re.compile(r"\bmodel=\b")
# An entry of a .conf file as HELM and we write them; a line that begins with '#' is a comment.
_CONF_ENTRY = re.compile(
    r"^\s*\{?\s*\"?description\"?\s*[:=]\s*\"([^\"\\$]+)\"\s*[,}\n]", re.MULTILINE
)


def read_conf(path: Path) -> list[str]:
    """Return the run entries of a .conf file, as far as each is written on a line of its own."""
    return _CONF_ENTRY.findall(path.read_text(encoding="utf-8"))


def parse_entry(run_entry: str) -> tuple[str, dict[str, str]]:
    """Return the name and the arguments of a run entry, as HELM reads it. Raises `UsageError`."""
    name, colon, rest = run_entry.partition(":")
    pairs = [pair.partition("=") for pair in rest.split(",")] if colon else []
    for key, equals, _ in pairs:
        if not equals:
            raise UsageError(f"the run entry {run_entry!r} has {key!r} where key=value is expected")
    return name, {key: value for key, _, value in pairs}


def without_model(run_entry: str) -> str:
    """Return the entry without its model."""
    scenario, arguments = parse_entry(run_entry)
    kept = [
        f"{key}={value}"
        for key, value in arguments.items()
        if key not in ("model", "model_deployment")
    ]
    return f"{scenario}:{','.join(kept)}" if kept else scenario


def check_entries(
    run_entries: Sequence[str],
    models: Sequence[str],
    *,
    local_path: Path = Path("prod_env"),
    has_plugins: bool = False,
    needs_weights: bool = True,
) -> None:
    """Raise `UsageError` with one sentence for the first run entry or model that HELM could not
    run.

    run_entries: those that HELM would expand.
    models: of --models-to-run.
    local_path: folder of HELM's model_deployments.yaml, whose names are the user's own.
    has_plugins: flags of HELM's name modules or models that register what is not known here.
    needs_weights: False with dummy weights.
    """
    deployments = _user_deployments(local_path)
    # What other plugins register cannot be checked here.
    has_unknown_names = has_plugins or any(
        point.value.partition(".")[0] != "flexgen_helm" for point in entry_points(group="helm")
    )
    parsed = [(run_entry, *parse_entry(run_entry)) for run_entry in run_entries]
    for _, _, arguments in parsed:
        if (model := arguments.get("model", "")).startswith(("/", ".", "~")):
            raise UsageError(naming_advice(model))
    if run_entries and not models and not any(map(_MODEL_ARGUMENT.search, run_entries)):
        first = run_entries[0]
        raise UsageError(
            f"the run entry {first!r} names no model: write "
            f"{first}{',' if parse_entry(first)[1] else ':'}model={PREFIX}{WHEEL_MODEL}, or "
            "another name that `flexgen-helm models` lists"
        )
    names = list(models)
    for run_entry, scenario, arguments in parsed:
        model = arguments.get("model", "")
        names += [model, arguments.get("model_deployment", "")]
        if not has_unknown_names:
            _check_scenario(scenario)
            if not models and model not in deployments:
                _check_has_prefix(run_entry, model)
    for name in dict.fromkeys(names):
        _check_model(name, deployments, needs_weights)
    if not has_unknown_names:
        for run_entry, scenario, arguments in parsed:
            _check_scenario_arguments(run_entry, scenario, arguments)


def _check_scenario(scenario: str) -> None:
    """Raise `UsageError` for a run spec that neither HELM nor this package has."""
    registered = getattr(
        sys.modules.get("helm.benchmark.run_spec"), "_REGISTERED_RUN_SPEC_FUNCTIONS", ()
    )
    if (known := run_spec_names().union(registered)) and scenario not in known:
        raise UsageError(
            f"the scenario {scenario!r} is not known; {question(scenario, known)}`flexgen-helm "
            "entries` lists run entries"
        )


def _check_has_prefix(run_entry: str, model: str) -> None:
    """Raise `UsageError` for a model of ours without `flexgen/`."""
    # All names of HELM have a slash, but for groups such as `text`.
    if "/" not in model and {model, base_name(model)} & set(known_names().values()):
        raise UsageError(
            f"the model {model!r} of {run_entry} needs a prefix: write model={PREFIX}{model}"
        )


def _check_model(name: str, deployments: Mapping[str, str | None], needs_weights: bool) -> None:
    """Raise `UsageError` for a model of ours that has no such name, or whose folder has no
    weights.
    """
    resolved = None
    if name in deployments:
        if (path := deployments[name]) is not None and needs_weights:
            resolved = resolve(path)
    elif name.startswith(PREFIX):
        resolved = _resolve_short(name.removeprefix(PREFIX))
    # What the hub has is not asked.
    if (
        needs_weights
        and resolved
        and resolved.path is not None
        and resolved.arguments.get("weights") != "dummy"
    ):
        local_weights(resolved)


def check_entries_of_flags(flags: Namespace, *, needs_weights: bool = True) -> list[str]:
    """Check all run entries and models of flags of `helm-run`; return hints for the user.

    flags: as `cli.helm_flags.parse_helm_flags` returns them. What an unusual .conf file says is
        left to HELM.
    Raises `UsageError` as `check_entries` does.
    """
    run_entries, local_path = entries_of_flags(flags), Path(flags.local_path or "prod_env")
    check_entries(
        run_entries,
        flags.models_to_run or [],
        local_path=local_path,
        has_plugins=bool(
            flags.plugins
            or flags.enable_huggingface_models
            or flags.enable_local_huggingface_models
        ),
        needs_weights=needs_weights,
    )
    files = [Path(path) for path in flags.conf_paths or ()] if flags.priority is None else []
    return [f"-c {file} is the shipped file" for file in files if not file.exists()] + model_hints(
        run_entries, local_path
    )


def entries_of_flags(flags: Namespace) -> list[str]:
    """Return the run entries of flags of `helm-run`. Raises `UsageError` for a file that
    does not exist.
    """
    run_entries = [*(flags.run_specs or ()), *(flags.run_entries or ())]
    if flags.priority is None:  # else HELM leaves entries out
        for path in map(Path, flags.conf_paths or ()):
            file = conf_file(path)
            with suppress(OSError, ValueError):  # HELM says why it cannot be read
                run_entries += read_conf(file)
                if not re.search(r"\b(entries|include)\b", file.read_text(encoding="utf-8")):
                    raise UsageError(
                        f"-c {path} has no run entries; `flexgen-helm entries` lists some, and a "
                        "file that names models goes into FLEXGEN_HELM_MODELS"
                    )
    return run_entries


def conf_file(path: Path) -> Path:
    """Return the file that -c names: `runs/quickstart.conf` is the shipped one where no such file
    is here.

    Raises `UsageError` where there is neither.
    """
    if path.exists():
        return path
    shipped = {
        file.name: file
        for folder in package_folders("flexgen_helm.runs")
        for file in folder.glob("*.conf")
    }
    if path.name in shipped and path.parent in (Path(), Path("runs")):
        return shipped[path.name]
    close = [f"runs/{name}" for name in closest(path.name, shipped)]
    advice = (
        f"did you mean {listed(close)}?"
        if close
        else f"shipped are runs/{', '.join(sorted(shipped))}"
    )
    raise UsageError(f"-c {path}: there is no such file; {advice}")


def models_of_flags(flags: Namespace) -> list[ResolvedModel]:
    """Return our models that flags of `helm-run` name; none whose names the user's own
    files define.
    """
    deployments = _user_deployments(Path(flags.local_path or "prod_env"))
    named = [
        *(flags.models_to_run or ()),
        *(parse_entry(entry)[1].get("model", "") for entry in entries_of_flags(flags)),
    ]
    names = [
        name for name in dict.fromkeys(named) if name.startswith(PREFIX) and name not in deployments
    ]
    return [_resolve_short(name.removeprefix(PREFIX)) for name in names]


def model_hints(run_entries: Sequence[str], local_path: Path) -> list[str]:
    """Return a sentence for each model that is neither ours nor the user's, with our name for it if
    there is one.
    """
    deployments = _user_deployments(local_path)
    repositories = {entry.hub_repo: entry.name for entry in CATALOG.values() if entry.hub_repo}
    models = dict.fromkeys(parse_entry(run_entry)[1].get("model", "") for run_entry in run_entries)
    return [
        f"model={model} is computed by HELM's own client"
        + (
            f"; write model={PREFIX}{repositories[model]} for flexgen_helm"
            if model in repositories
            else ""
        )
        for model in models
        if "/" in model and not model.startswith(PREFIX) and model not in deployments
    ]


def _check_scenario_arguments(run_entry: str, scenario: str, arguments: Mapping[str, str]) -> None:
    """Refuse an entry that lacks an argument of its run spec, or has one that does not exist."""
    function, expanders = run_spec_function(scenario), run_expander_names()
    if function is None or not expanders:
        return
    names = [parameter.arg for parameter in function.args.args + function.args.kwonlyargs]
    required = names[: len(function.args.args) - len(function.args.defaults)]
    unknown = [key for key in arguments if key not in names and key not in expanders]
    if unknown and function.args.kwarg is None:
        meant = question(unknown[0], [*names, *(expanders if len(unknown[0]) > 2 else ())])
        raise UsageError(
            f"the run entry {run_entry!r} has {unknown[0]!r}, which {scenario} does not take; "
            f"{meant}it takes {', '.join(names) or 'no arguments of its own'}"
        )
    missing = [name for name in required if name not in arguments]
    if missing:
        added = ",".join(f"{name}=…" for name in missing)
        rest = run_entry.partition(":")[2]
        raise UsageError(
            f"the run entry {run_entry!r} lacks {' and '.join(missing)}: write {scenario}:{added}"
            f"{',' if rest else ''}{rest}; `flexgen-helm entries {scenario} --all` lists entries"
        )


def _resolve_short(short: str) -> ResolvedModel:
    """Resolve a name without `flexgen/`. Raises `UsageError` where it is none."""
    # `flexgen-helm run` writes org/repo as org--repo, whatever folders there are.
    if "/" in short and not is_hub_name(short):
        raise UsageError(naming_advice(short))
    return resolve(short.replace("/", "--"))


def _user_deployments(folder: Path) -> dict[str, str | None]:
    """Return what a name means in the user's deployment file, for names that are not only ours.

    The value is the model's path, if its weights are read from there; else None.
    """
    deployments: dict[str, str | None] = {}
    try:
        content = yaml.safe_load((folder / "model_deployments.yaml").read_text(encoding="utf-8"))
        for entry in content["model_deployments"]:
            is_ours = entry["client_spec"]["class_name"] == CLIENT_CLASS
            arguments = entry["client_spec"].get("args") or {}
            path, model = arguments.get("path"), entry.get("model_name")
            # An entry of ours without a path or another name, as `flexgen-helm run` writes them, is
            # looked up by its name.
            if not is_ours or path or model or not entry["name"].startswith(PREFIX):
                has_weights = is_ours and path and arguments.get("weights") != "dummy"
                deployments |= dict.fromkeys(
                    filter(None, (entry["name"], model)), str(path) if has_weights else None
                )
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}  # HELM says what is wrong with it
    return deployments
