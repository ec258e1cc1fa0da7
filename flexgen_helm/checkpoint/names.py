"""What a model name means: the catalog, the hub, a folder, a file, or a name of the user's own. No
torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL, CatalogEntry
from flexgen_helm.checkpoint.known_names import read_user_models, unknown_model_message
from flexgen_helm.checkpoint.suffixes import PREFIX, is_hub_name, split_precision, split_template
from flexgen_helm.errors import UnknownModelError

Kind = Literal["wheel", "hub", "folder", "gguf", "unpublished"]

# What names of models say about their kind.
_INSTRUCT_NAME = re.compile(r"instruct|chat|[-_]it\b|[-_]iml[-_]")
_BASE_NAME = re.compile(r"[-_](base|pt|pretrained)\b")
# Families whose instruct models say so in their names, and whose base models have a chat template
# too.
_BASE_FAMILY = re.compile(r"(qwen(1\.5|2|2\.5)|smollm2?)(?![\d.])")


@dataclass(frozen=True)
class ResolvedModel:
    """What a model name means. Filled by `resolve`.

    name: without `flexgen/` and without the suffixes of precision and chat template.
    kind: where the weights come from; 'unpublished' has only dummy weights.
    path: the local folder or file (kinds 'folder' and 'gguf').
    revision: of the hub repository, None for its default branch.
    arguments: client arguments of the user's own models file.
    apply_chat_template: what the name's suffix says, None without one.
    """

    name: str
    precision: str
    kind: Kind
    path: Path | None = None
    hub_repo: str | None = None
    revision: str | None = None
    entry: CatalogEntry | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    apply_chat_template: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine that the name stands for; its suffixes go before the models
        file.
        """
        options = dict(self.arguments)
        if self.precision != "fp16":
            options["precision"] = self.precision
        if self.apply_chat_template is not None:
            options["apply_chat_template"] = self.apply_chat_template
        return options

    @property
    def is_instruct(self) -> bool:
        """Whether the catalog or the name says that the model is tuned to follow instructions."""
        if self.entry is not None:
            return self.entry.instruct
        return any(_INSTRUCT_NAME.search(name) for name in self._names)

    @property
    def is_base(self) -> bool:
        """Whether the catalog or the name says that the model is not tuned to follow instructions.

        A chat template proves nothing.
        """
        if self.entry is not None:
            return not self.entry.instruct
        return not self.is_instruct and any(
            _BASE_NAME.search(name) or _BASE_FAMILY.match(name) for name in self._names
        )

    @property
    def _names(self) -> list[str]:
        """The model's name, and that of its folder, file or repository, without the
        organization.
        """
        names = (self.name, self.path.name if self.path is not None else "", self.hub_repo or "")
        return [re.split(r"/|--", name.lower())[-1] for name in names]


def resolve(
    name: str | os.PathLike[str] | ResolvedModel, revision: str | None = None
) -> ResolvedModel:
    """Find out what a name means, without the network; what is resolved already stays as it is.

    A name that exists as a whole (in the user's models file, in the catalog, on disk) wins over the
    same name split into base and suffixes. `revision` wins over the models file's. Raises
    `UnknownModelError` with the closest names, `UsageError` if the models file cannot be used.
    """
    if isinstance(name, ResolvedModel):
        return name
    text = os.fspath(name).removeprefix(PREFIX)
    user_models = read_user_models()
    without_precision, precision = split_precision(text)
    without_suffixes, template = split_template(without_precision)
    for known, its_precision, its_template in (
        (text, "fp16", None),
        (without_precision, precision, None),
        (without_suffixes, precision, template),
    ):
        model = (
            _resolve_user_model(known, its_precision, revision, user_models[known])
            if known in user_models
            else find_known(known, its_precision, revision)
        )
        if model is not None:
            return replace(model, apply_chat_template=its_template)
    # Any org/repo may exist on the hub, so the hub comes last, and there the suffixes are ours.
    if is_hub_name(without_suffixes):
        repo = without_suffixes.replace("--", "/")
        return ResolvedModel(
            name=repo.replace("/", "--"),
            precision=precision,
            kind="hub",
            hub_repo=repo,
            revision=revision,
            entry=next((entry for entry in CATALOG.values() if entry.hub_repo == repo), None),
            apply_chat_template=template,
        )
    raise UnknownModelError(unknown_model_message(without_suffixes, template, precision))


def find_known(name: str, precision: str, revision: str | None = None) -> ResolvedModel | None:
    """Look a name up in the catalog and on disk."""
    if (entry := CATALOG.get(name)) is not None:
        kind: Kind = "hub" if entry.hub_repo else "wheel" if name == WHEEL_MODEL else "unpublished"
        return ResolvedModel(
            name, precision, kind, hub_repo=entry.hub_repo, revision=revision, entry=entry
        )
    if not name:
        return None  # as a path it would be the current folder
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".safetensors"):
        return ResolvedModel(
            path.resolve().stem if path.is_file() else path.resolve().name,
            precision,
            "folder",
            path,
        )
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(path.stem, precision, "gguf", path)
    return None


def _resolve_user_model(
    name: str, precision: str, revision: str | None, arguments: Mapping[str, Any]
) -> ResolvedModel:
    path = arguments.get("path")
    model = find_known(path or name, precision, revision or arguments.get("revision"))
    if model is None:
        problem = f"{path} does not exist" if path else "it is no catalog name, and needs a path"
        file = os.environ.get("FLEXGEN_HELM_MODELS")
        raise UnknownModelError(f"{file} (FLEXGEN_HELM_MODELS): {name}: {problem}")
    options = {key: value for key, value in arguments.items() if key not in ("path", "revision")}
    return replace(model, name=name, arguments=options)
