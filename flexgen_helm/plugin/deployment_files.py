"""Entries in `prod_env/*.yaml` for HELM's commands that load no plugins: `helm-summarize`, the proxy, Slurm workers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark.model_metadata_registry import get_model_metadata
from helm.benchmark.tokenizer_config_registry import get_tokenizer_config
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.core.files import replace_text


def merge(folder: Path, names: list[str]) -> None:
    """Add the deployments `names`, their metadata and tokenizers; entries that exist stay as they are.

    The entries carry no client arguments: what a name means is looked up when it is used.
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
        present = [entry["name"] for entry in content.get(key) or []]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        hwarn(f"{path} is left as it is, because it is not as HELM writes it: {error}")
        return
    missing = [_plain(entry) for entry in wanted if entry["name"] not in present]
    if not missing:
        return
    merged = {**content, key: [*(content.get(key) or []), *missing]}
    addition = yaml.safe_dump(missing, sort_keys=False, allow_unicode=True)
    indented = "".join(f"  {line}" for line in addition.splitlines(keepends=True))
    start = text if text.endswith("\n") or not text else text + "\n"
    start = start or f"{key}:\n"
    # Appending keeps the user's comments and order; it is right where the file still reads as intended.
    for candidate in (start + indented, start + addition):
        if _reads_as(candidate, merged):
            break
    else:
        candidate = yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, candidate)


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    """Without empty values, which HELM's readers fill in; `deployment_names` is HELM's own note, not ours."""
    return {name: value for name, value in entry.items() if value not in (None, False) and name != "deployment_names"}


def _reads_as(text: str, wanted: dict[str, Any]) -> bool:
    try:
        return bool(yaml.safe_load(text) == wanted)
    except yaml.YAMLError:
        return False
