"""How a local folder or file is named for HELM, which takes no path. No torch."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import yaml

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.folder import folder_of, read_config
from flexgen_helm.checkpoint.known_names import no_such_path_message, read_user_models
from flexgen_helm.checkpoint.names import find_known
from flexgen_helm.checkpoint.suffixes import PREFIX, split_precision, with_suffixes
from flexgen_helm.errors import UnknownModelError


def naming_advice(path: str) -> str:
    """Say how a local folder or file is named for HELM: lines to paste, and the name that then
    works.

    Raises `UnknownModelError` if there is no such folder or file, or the error that says why it is
    no model.
    """
    model = find_known(path, "fp16") or find_known(*split_precision(path))
    if model is None or model.path is None:
        raise UnknownModelError(no_such_path_message(path))
    if model.kind == "folder":
        read_config(folder_of(model.path))  # refuses what is no model
    full, user_models = model.path.absolute(), read_user_models()
    named = (
        name
        for name, arguments in user_models.items()
        if Path(str(arguments.get("path") or name)).absolute() == full
    )
    name = next(named, "")
    lines: list[str] = []
    if not name:
        name = re.sub(r"[^A-Za-z0-9.]+", "-", model.name).strip("-.")
        name = f"my-{name}" if not name or name in CATALOG or name in user_models else name
        line = yaml.safe_dump(
            {name: str(full)}, width=len(str(full)) + len(name) + 9, allow_unicode=True
        ).strip()
        file = os.environ.get("FLEXGEN_HELM_MODELS")
        lines = [f"echo {shlex.quote(line)} >> {shlex.quote(file or 'models.yaml')}"]
        lines += [] if file else ['export FLEXGEN_HELM_MODELS="$PWD/models.yaml"']
    advice = f"write model={PREFIX}{with_suffixes(name, None, model.precision)}"
    if lines:
        advice = "\n  ".join([f"paste these lines, and {advice}:", *lines])
    return f"HELM takes no path as a model name; {advice}"
