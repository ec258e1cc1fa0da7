"""Entries in `prod_env/*.yaml` for HELM's commands that load no plugins: `helm-summarize`, the
proxy, Slurm workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cattrs
import yaml
from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark.model_deployment_registry import ModelDeployment
from helm.benchmark.model_metadata_registry import ModelMetadata, get_model_metadata
from helm.benchmark.tokenizer_config_registry import TokenizerConfig, get_tokenizer_config
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.files import replace_text
from flexgen_helm.paths import state_lock
from flexgen_helm.plugin import registration

Entry = dict[str, Any]


def add_entries(folder: Path, names: list[str]) -> None:
    """Add the deployments `names`, their metadata and their tokenizers to HELM's files in `folder`.

    Entries that we wrote earlier are replaced if the name means another model now; entries that a
    user wrote or changed stay. Ours carry no client arguments: a name is resolved when it is used.
    """
    # Keyed by the name of the list in the file; only the metadata's file is called otherwise.
    entries: dict[str, list[Entry]] = {
        "model_deployments": [],
        "models": [],
        "tokenizer_configs": [],
    }
    for name in names:
        deployment = deployments.get_model_deployment(name)
        # Our patch of HELM answers for names that are in no table. Where the user has an entry,
        # HELM makes the metadata that it needs.
        if name not in deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT:
            entries["model_deployments"].append(asdict(deployment))
            entries["models"].append(asdict(get_model_metadata(name)))
        if deployment.tokenizer_name and (
            config := get_tokenizer_config(deployment.tokenizer_name)
        ):
            entries["tokenizer_configs"].append(asdict(config))
    for key, wanted in entries.items():
        path = folder / f"{'model_metadata' if key == 'models' else key}.yaml"
        # Without the lock, the entries of a run that starts now could be lost.
        with state_lock("prod_env.lock", timeout=60):
            text = _text_with(
                path, key, {entry["name"]: _without_defaults(entry) for entry in wanted}
            )
            if text is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(path, text)


def _text_with(path: Path, key: str, wanted: Mapping[str, Entry]) -> str | None:
    """Return the file's text with the wanted entries in its list `key`; None if nothing changes."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        content = yaml.safe_load(text) or {}
        present = {entry["name"]: entry for entry in content.get(key) or []}
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
        hwarn(f"{path} stays unchanged, because it is not as HELM writes it: {error}")
        return None
    for name, entry in wanted.items():
        if name in present and present[name] != entry and _is_ours(key, present[name]):
            hwarn(
                f"{path}: the entry of {name} is replaced, because the name means another model "
                "than before"
            )
            # One that does not stand in the file as we dump it is still there, so the file is
            # rewritten below.
            for dump in _dumps([present.pop(name)]):
                text = text.replace(dump, "", 1)
    missing = [entry for name, entry in wanted.items() if name not in present]
    if not missing:
        return None
    merged = {**content, key: [*present.values(), *missing]}
    # Appending keeps the user's comments and order; it is right where the file then reads as
    # intended.
    start = text if text.endswith("\n") or not text else text + "\n"
    for appended in _dumps(missing):
        candidate = start + ("" if content else f"{key}:\n") + appended
        with suppress(yaml.YAMLError):
            if yaml.safe_load(candidate) == merged:
                return candidate
    return yaml.safe_dump(merged, sort_keys=False, allow_unicode=True)


def _dumps(entries: list[Entry]) -> tuple[str, str]:
    """Return the entries as a file's list may hold them, indented and not."""
    plain = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)
    return "".join(f"  {line}" for line in plain.splitlines(keepends=True)), plain


def _is_ours(key: str, entry: Entry) -> bool:
    kinds = {
        "model_deployments": ModelDeployment,
        "models": ModelMetadata,
        "tokenizer_configs": TokenizerConfig,
    }
    try:  # HELM's metadata has no default for the release date
        parsed: Any = cattrs.structure({"release_date": None, **entry}, kinds[key])
    except Exception:  # HELM says what is wrong with it, where it reads the file
        return False
    return _without_defaults(asdict(parsed)) == entry and registration.is_ours(parsed)


def _without_defaults(entry: Entry) -> Entry:
    """Drop empty values, which HELM's readers fill in, and `deployment_names`, which HELM itself
    adds.
    """
    return {
        name: value
        for name, value in entry.items()
        if value is not None and value is not False and name != "deployment_names"
    }
