"""Entries in `prod_env/*.yaml` for HELM's commands that load no plugins: `helm-summarize`, the proxy, Slurm workers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import cattrs
import dacite
import yaml
from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark.model_deployment_registry import ModelDeployment
from helm.benchmark.model_metadata_registry import ModelMetadata, get_model_metadata
from helm.benchmark.tokenizer_config_registry import TokenizerConfig, get_tokenizer_config
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.files import replace_text
from flexgen_helm.plugin import registration


def merge(folder: Path, names: list[str]) -> None:
    """Add the deployments `names`, their metadata and tokenizers.

    Entries that we wrote earlier are replaced where the name has come to mean another model; those that a user wrote
    or changed stay as they are. The entries carry no client arguments: what a name means is looked up when it is used.
    """
    entries: dict[str, list[Any]] = {"model_deployments": [], "model_metadata": [], "tokenizer_configs": []}
    for name in names:
        deployment = deployments.get_model_deployment(name)
        # Where the user has an entry for it, HELM makes what metadata it needs.
        if name not in deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT:
            entries["model_deployments"].append(asdict(deployment))
            entries["model_metadata"].append(asdict(get_model_metadata(name)))
        if deployment.tokenizer_name and (config := get_tokenizer_config(deployment.tokenizer_name)):
            entries["tokenizer_configs"].append(asdict(config))
    for file, wanted in entries.items():
        # HELM's metadata file is the one whose list is called otherwise.
        _merge_file(folder / f"{file}.yaml", "models" if file == "model_metadata" else file, wanted)


def _merge_file(path: Path, key: str, wanted: list[dict[str, Any]]) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        content = yaml.safe_load(text) or {}
        present = list(content.get(key) or [])
        names = [entry["name"] for entry in present]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        hwarn(f"{path} is left as it is, because it is not as HELM writes it: {error}")
        return
    new = {entry["name"]: _plain(entry) for entry in wanted}
    for index, entry in enumerate(present):
        name = entry["name"]
        if entry != new.get(name, entry) and _is_ours(key, entry):
            hwarn(f"{path}: the entry of {name} is written anew, because the name means another model than before")
            present[index] = new[name]
            text = _with_entry_replaced(text, entry, new[name])
    missing = [entry for name, entry in new.items() if name not in names]
    merged = {**content, key: [*present, *missing]}
    if merged == content:
        return
    start = text if text.endswith("\n") or not text else text + "\n"
    start = start or f"{key}:\n"
    # Appending keeps the user's comments and order; it is right where the file still reads as intended.
    for candidate in (start + text for text in _dumps(missing)):
        if _reads_as(candidate, merged):
            break
    else:
        candidate = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, candidate)


def _dumps(entries: list[dict[str, Any]]) -> tuple[str, str]:
    """The entries as they may stand in a file's list, indented and not."""
    if not entries:
        return "", ""
    plain = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)
    return "".join(f"  {line}" for line in plain.splitlines(keepends=True)), plain


def _with_entry_replaced(text: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """Only an entry that stands there as we dump it is found; else the caller sees that nothing changed."""
    for before, after in zip(_dumps([old]), _dumps([new])):
        if before in text:
            return text.replace(before, after, 1)
    return text


def _is_ours(key: str, entry: dict[str, Any]) -> bool:
    try:
        if key == "models":
            read: Any = dacite.from_dict(ModelMetadata, entry)
        else:
            read = cattrs.structure(entry, ModelDeployment if key == "model_deployments" else TokenizerConfig)
    except Exception:  # HELM says what is wrong with it, where it reads the file
        return False
    return _plain(asdict(read)) == entry and registration.is_ours(read)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Without empty values, which HELM's readers fill in; `deployment_names` is HELM's own note, not ours."""
    return {name: value for name, value in entry.items() if value not in (None, False) and name != "deployment_names"}


def _reads_as(text: str, wanted: dict[str, Any]) -> bool:
    try:
        return bool(yaml.safe_load(text) == wanted)
    except yaml.YAMLError:
        return False
