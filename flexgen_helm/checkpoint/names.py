"""What a model name means: the catalog, the hub, a folder, a file, or a name of the user's own. No
torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from flexgen_helm.checkpoint.catalog import CATALOG, WHEEL_MODEL, CatalogEntry, HalfType
from flexgen_helm.checkpoint.folder import CONFIG, read_config, read_json
from flexgen_helm.checkpoint.quantized.config import Quantization, read_quantization
from flexgen_helm.errors import UnknownModelError, UsageError
from flexgen_helm.files import closest, listed
from flexgen_helm.models.config import EMBED, HEAD, ModelConfig, expert_of
from flexgen_helm.quant.formats import BlockFormat
from flexgen_helm.quant.precisions import PRECISIONS, Precision, PublishedFormats, precision_named

# What HELM's names of our models begin with.
PREFIX = "flexgen/"
Kind = Literal["wheel", "hub", "folder", "gguf", "unpublished"]

# Longest first: "-4bit" is also the end of "-paper-4bit".
_SUFFIXES = sorted(set(PRECISIONS) - {"fp16"}, key=len, reverse=True)
# Endings that say whether plain prompts go through the chat template; they come before a
# precision's.
TEMPLATE_SUFFIXES: Mapping[bool, str] = {True: "-with-template", False: "-no-template"}
# Before the digest of other settings of prompts, which one call of `flexgen-helm run` knows.
DIGEST_SUFFIX = "-chat-"
_DIGEST = re.compile(DIGEST_SUFFIX + r"[0-9a-f]{6}$")
# What names of models say about their kind.
_INSTRUCT_NAME = re.compile(r"instruct|chat|[-_]it\b|[-_]iml[-_]")
_BASE_NAME = re.compile(r"[-_](base|pt|pretrained)\b")
# Families whose instruct models say so in their names, and whose base models have a chat template
# too.
_BASE_FAMILY = re.compile(r"(qwen(1\.5|2|2\.5)|smollm2?)(?![\d.])")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/|--)[A-Za-z0-9][\w.-]*")
# An ending that other programs use for a precision: '-8bit', '-int4', '-bf16', '-q4_0'.
_FOREIGN_PRECISION = re.compile(
    r"[-.]((?:paper-)?\d+-?bit\S*|int\d+|b?fp?\d+\S*|i?q\d\w*|awq|gptq)$", re.IGNORECASE
)
_KINDS_OF_NAMES = (
    "a model is named by the catalog, by a hub repository (org/repo or org--repo), by a folder "
    "with config.json and safetensors files, by a .gguf file, or in the file that "
    "FLEXGEN_HELM_MODELS names"
)


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
        """Whether the catalog or the name says that it is not; a chat template proves nothing."""
        if self.entry is not None or self.is_instruct:
            return not self.is_instruct
        return any(_BASE_NAME.search(name) or _BASE_FAMILY.match(name) for name in self._names)

    @property
    def _names(self) -> list[str]:
        """The model's name, and that of its folder, file or repository, without the
        organization.
        """
        given = (self.name, self.path.name if self.path is not None else "", self.hub_repo or "")
        return [re.split(r"/|--", name.lower())[-1] for name in given]


def split_precision(name: str) -> tuple[str, str]:
    """Split `opt-125m-paper-4bit` into (`opt-125m`, 'paper-4bit'); without a suffix the precision
    is 'fp16'.
    """
    for precision in _SUFFIXES:
        base = name.removesuffix(f"-{precision}")
        if base and base != name:
            return base, precision
    return name, "fp16"


def split_template(name: str) -> tuple[str, bool | None]:
    """Split a name without precision, `opt-125m-no-template`, into (`opt-125m`, False); None
    without a suffix.
    """
    for choice, suffix in TEMPLATE_SUFFIXES.items():
        base = name.removesuffix(suffix)
        if base and base != name:
            return base, choice
    return name, None


def base_name(name: str) -> str:
    """Return a name without its suffixes, for people; a name that exists as a whole may look as if
    it had some.
    """
    return split_template(_DIGEST.sub("", split_precision(name)[0]))[0]


def without_digest(name: str) -> str:
    """Return a name without the digest of settings of prompts."""
    base, precision = split_precision(name)
    return with_suffixes(_DIGEST.sub("", base), None, precision)


def with_suffixes(base: str, template: bool | None, precision: str) -> str:
    """Return the name of a model under these settings."""
    suffix = "" if template is None else TEMPLATE_SUFFIXES[template]
    return base + suffix + ("" if precision == "fp16" else f"-{precision}")


def resolve(name: str | os.PathLike[str], revision: str | None = None) -> ResolvedModel:
    """Find out what a name means, without the network.

    A name that exists as a whole (in the user's models file, in the catalog, on disk) wins over the
    same name split into base and suffixes. `revision` wins over the models file's. Raises
    `UnknownModelError` with the closest names, `UsageError` if the models file cannot be used.
    """
    text = os.fspath(name).removeprefix(PREFIX)
    user_models = _read_user_models()
    longer, suffix = split_precision(text)
    base, template = split_template(longer)
    candidates = {text: ("fp16", None), longer: (suffix, None), base: (suffix, template)}
    for candidate, (precision, choice) in candidates.items():
        if candidate in user_models:
            user_model = _resolve_user_model(candidate, precision, revision, user_models[candidate])
            return replace(user_model, apply_chat_template=choice)
        if (model := _resolve_known(candidate, precision, revision)) is not None:
            return replace(model, apply_chat_template=choice)
    # Any org/repo may exist on the hub, so the hub comes last, and there the suffixes are ours.
    if is_hub_name(base):
        repo = base.replace("--", "/")
        entry = next((entry for entry in CATALOG.values() if entry.hub_repo == repo), None)
        return ResolvedModel(
            repo.replace("/", "--"),
            suffix,
            "hub",
            None,
            repo,
            revision,
            entry,
            apply_chat_template=template,
        )
    raise UnknownModelError(_unknown_model(base, template, suffix))


def is_hub_name(name: str) -> bool:
    """Whether a name has the form org/repo or org--repo."""
    return _HUB_NAME.fullmatch(name) is not None and name.count("--") + name.count("/") == 1


def read_model_config(
    model: str | os.PathLike[str] | ResolvedModel,
) -> tuple[ModelConfig, HalfType]:
    """Return the model config, and the type in which the weights are stored, without weights: what
    a plan needs.

    Of a .gguf file it is what the header says. Never asks the network.
    Raises `UsageError` for a model that is neither in the catalog nor on this machine.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve(model)
    if resolved.entry is not None:
        return resolved.entry.config, resolved.entry.default_dtype
    path = resolved.path
    if resolved.hub_repo is not None:
        from flexgen_helm.checkpoint.hub import cached_snapshot

        path = cached_snapshot(resolved.hub_repo, resolved.revision)
    if path is None:
        remedy = (
            f"run: flexgen-helm fetch {resolved.hub_repo}"
            if resolved.hub_repo
            else "name a model that is here"
        )
        raise UsageError(
            f"neither the catalog nor this machine has the sizes of {resolved.name}; {remedy}"
        )
    if resolved.kind == "gguf":
        # Imported late: torch and the gguf package take a second.
        from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint

        checkpoint = GgufCheckpoint(path)
        return checkpoint.config, "bfloat16" if str(
            checkpoint.storage_dtype
        ) == "torch.bfloat16" else "float16"
    _, config, content = read_config(path.parent if path.is_file() else path)
    dtype = content.get("dtype") or content.get("torch_dtype")
    return config, "bfloat16" if dtype == "bfloat16" else "float16"


def planned_precision(model: str | os.PathLike[str] | ResolvedModel, precision: str) -> Precision:
    """Return a precision by its name, with the formats of the matrices that rest as they are
    published.

    Those of a .gguf file are its own, those of other models what `quantization_config` says of all.
    Raises `UsageError` for an unknown precision.
    """
    resolved = model if isinstance(model, ResolvedModel) else resolve(model)
    named = precision_named(precision)
    if resolved.kind == "gguf" and resolved.path is not None:
        from flexgen_helm.checkpoint.gguf_checkpoint import GgufCheckpoint

        return replace(named, published=PublishedFormats(GgufCheckpoint(resolved.path).formats))
    quantization = _quantization(resolved)
    if quantization is None:
        return named
    return replace(named, published=_planned_formats(read_model_config(resolved)[0], quantization))


@lru_cache(maxsize=2)  # the precisions of a model share them
def _planned_formats(config: ModelConfig, quantization: Quantization) -> PublishedFormats:
    """Return what `quantization` says of a model's matrices; what it ignores is asked by name, the
    rest by kind.
    """
    found: dict[str, dict[str, BlockFormat]] = {}
    for first in {*config.first_stages.values()} - {EMBED, HEAD}:
        found[first] = {
            name.removeprefix(first): fmt
            for name, shape in config.stage_tensors(first)
            if len(shape) == 2 and (quantization.method != "mxfp4" or expert_of(name))
            if not name.endswith(".router.weight")
            and (fmt := quantization.planned_format(shape[1])) is not None
        }
    formats = {
        stage + name: fmt
        for stage, first in config.first_stages.items()
        for name, fmt in found.get(first, {}).items()
        if not quantization.ignored or not _is_ignored(stage + name, quantization.ignored)
    }
    return PublishedFormats(formats, bool(formats), are_alike=not quantization.ignored)


def _is_ignored(name: str, ignored: Iterable[str]) -> bool:
    module = f"model.{name.replace('.attn.', '.self_attn.').removesuffix('.weight')}"
    return any(
        re.match(entry[3:], module) if entry.startswith("re:") else entry == module
        for entry in ignored
    )


def quantized_by(model: str | os.PathLike[str]) -> str | None:
    """Return the method by which a catalog model's or a local folder's weights are quantized; None
    for all others.
    """
    quantization = _quantization(resolve(model))
    return None if quantization is None else quantization.method


def _quantization(resolved: ResolvedModel) -> Quantization | None:
    path = Path(CONFIG)
    if resolved.entry is not None:
        content = resolved.entry.published
    elif resolved.path is not None and resolved.kind == "folder":
        path = (resolved.path.parent if resolved.path.is_file() else resolved.path) / CONFIG
        content = read_json(path)
    else:
        return None
    return read_quantization(content, path)


def _resolve_known(name: str, precision: str, revision: str | None) -> ResolvedModel | None:
    """Look a name up in the catalog and on disk."""
    if (entry := CATALOG.get(name)) is not None:
        kind: Kind = "hub" if entry.hub_repo else "wheel" if name == WHEEL_MODEL else "unpublished"
        return ResolvedModel(name, precision, kind, None, entry.hub_repo, revision, entry)
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
    model = _resolve_known(path or name, precision, revision or arguments.get("revision"))
    if model is None:
        problem = f"{path} does not exist" if path else "it is no catalog name, and needs a path"
        file = os.environ.get("FLEXGEN_HELM_MODELS")
        raise UnknownModelError(f"{file} (FLEXGEN_HELM_MODELS): {name}: {problem}")
    options = {key: value for key, value in arguments.items() if key not in ("path", "revision")}
    return replace(model, name=name, arguments=options)


def _read_user_models() -> dict[str, dict[str, Any]]:
    """Return name -> client arguments of the file that `FLEXGEN_HELM_MODELS` names; its paths are
    relative to it.
    """
    named = os.environ.get("FLEXGEN_HELM_MODELS")
    if not named:
        return {}
    file = Path(named).expanduser()
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"FLEXGEN_HELM_MODELS names {file}, which cannot be read: {error}"
        ) from error
    if not isinstance(content, dict):
        raise UsageError(
            f"FLEXGEN_HELM_MODELS names {file}, which must map model names to paths or arguments"
        )
    models: dict[str, dict[str, Any]] = {}
    for name, value in content.items():
        arguments = {"path": value} if isinstance(value, str) else value
        if not isinstance(arguments, dict) or not isinstance(arguments.get("path", ""), str):
            raise UsageError(
                f"model {name} of {file} must be a path, or arguments of which `path` is a string"
            )
        if "path" in arguments and arguments["path"] not in CATALOG:
            arguments = {
                **arguments,
                "path": str(file.parent / Path(arguments["path"]).expanduser()),
            }
        models[str(name).removeprefix(PREFIX)] = arguments
    return models


def user_names() -> list[str]:
    """Return the names in the file that `FLEXGEN_HELM_MODELS` names."""
    return list(_read_user_models())


def known_names() -> dict[str, str]:
    """Return everything that means a catalog model or one of the user's: its name, its repository
    -> its name.
    """
    aliases = {name: name for name in [*_read_user_models(), *CATALOG]}
    for entry in CATALOG.values():
        if entry.hub_repo is not None:
            aliases |= {entry.hub_repo: entry.name}
            aliases.setdefault(entry.hub_repo.partition("/")[2], entry.name)
    return aliases


def original_of(name: str) -> str | None:
    """Return the catalog's name of the model that `name`, of a quantized one or of its file, is
    made of, if any.
    """
    known = {alias.lower(): model for alias, model in known_names().items()}
    base = re.split(r"/|--", name.partition("@")[0].removesuffix(".gguf").lower())[-1]
    while ending := _FOREIGN_PRECISION.search(base):
        base = base[: ending.start()]
        if base in known:
            return known[base]
    return None


def close_names(name: str) -> list[str]:
    """Return the catalog names and names of the user's own that `name` may mean, best first."""
    aliases = known_names()
    # A short name is not like a repository, whose organization differs from it in any case.
    candidates = aliases if "/" in name else [alias for alias in aliases if "/" not in alias]
    # More than are returned, because several aliases may mean one model.
    return list(dict.fromkeys(aliases[alias] for alias in closest(name, candidates, count=9)))[:3]


def naming_advice(path: str) -> str:
    """Say how a local folder or file is named for HELM: lines to paste, and the name that then
    works.

    Raises `UnknownModelError` if there is no such folder or file, or the error that says why it is
    no model.
    """
    base, suffix = split_precision(path)
    model = _resolve_known(path, "fp16", None) or _resolve_known(base, suffix, None)
    if model is None or model.path is None:
        raise UnknownModelError(_no_such_path(path))
    if model.kind == "folder":
        # refuses what is no model
        read_config(model.path.parent if model.path.is_file() else model.path)
    full, user_models = model.path.absolute(), _read_user_models()
    paths = {
        name: Path(str(arguments.get("path") or name)).absolute()
        for name, arguments in user_models.items()
    }
    name = next((name for name, path in paths.items() if path == full), "")
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


def _no_such_path(path: str) -> str:
    return f"there is no model file or folder {path}; {_KINDS_OF_NAMES}"


def _unknown_model(name: str, template: bool | None, precision: str) -> str:
    if name.endswith((".gguf", ".safetensors")) or name.startswith((".", "/", "~")):
        return _no_such_path(name)
    unknown = f"model {name!r} is not known"
    ending = _FOREIGN_PRECISION.search(name)
    if ending is not None and (base := name[: ending.start()]) in known_names():
        longer = [known for known in known_names() if known.startswith(name)]
        names = listed([*longer, *(with_suffixes(base, template, known) for known in PRECISIONS)])
        return f"{unknown}: {ending[1]!r} is no precision of flexgen_helm; write {names}"
    if close := close_names(name):
        names = listed(with_suffixes(known, template, precision) for known in close)
        return f"{unknown}; did you mean {names}? `flexgen-helm models` lists all names"
    return f"{unknown}; {_KINDS_OF_NAMES}; `flexgen-helm models` lists the catalog"
