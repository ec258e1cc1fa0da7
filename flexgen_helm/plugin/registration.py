"""What HELM's registries know of `flexgen/…` names: deployments, metadata, tokenizers.

HELM calls a generator at every look-up and does not cache what it returns, so the plugin's context
does.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark import model_metadata_registry as metadata_registry
from helm.benchmark import tokenizer_config_registry as tokenizer_registry
from helm.benchmark.model_deployment_registry import ClientSpec, ModelDeployment, WindowServiceSpec
from helm.benchmark.model_metadata_registry import (
    FULL_FUNCTIONALITY_TEXT_MODEL_TAG,
    INSTRUCTION_FOLLOWING_MODEL_TAG,
    TEXT_MODEL_TAG,
    ModelMetadata,
    register_model_metadata,
)
from helm.benchmark.tokenizer_config_registry import (
    TokenizerConfig,
    TokenizerSpec,
    tokenizer_config_generator,
)
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.errors import FlexgenError
from flexgen_helm.plugin.context import get_context
from flexgen_helm.run_entries import CLIENT_CLASS
from flexgen_helm.service.models import ModelArguments, ModelFacts, needs_download

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

# By name, because importing the classes would bring HELM's client and window machinery into every
# registration.
TOKENIZER_CLASS = "flexgen_helm.plugin.tokenizer_client.FlexgenTokenizer"
WINDOW_CLASS = "flexgen_helm.plugin.tokenizer_client.FlexgenWindowService"
END_OF_TEXT = "<|endoftext|>"


def runs_scenarios() -> bool:
    """Whether this process runs scenarios; `helm-summarize` imports the plugin only because runs
    name our metric.
    """
    program = getattr(sys.modules.get("__main__"), "__spec__", None)  # of `python -m`
    return (
        "helm.benchmark.run" in sys.modules or getattr(program, "name", "") == "helm.benchmark.run"
    )


def make_deployment(name: str) -> ModelDeployment:
    """Make the deployment `flexgen/…`. Raises `UnknownModelError` with one sentence, which reaches
    the user.

    In a process that only shows results, a model that is not known here has its name and nothing
    else.
    """
    context, facts = get_context(), None
    try:
        model = context.find_model(name)
        if runs_scenarios() or not needs_download(model):
            facts = context.models.facts(model)
    except FlexgenError:
        if runs_scenarios():
            raise
    facts = facts or ModelFacts(
        name.removeprefix(PREFIX), max_positions=1, num_parameters=0, instruct=False
    )
    if name not in metadata_registry.MODEL_NAME_TO_MODEL_METADATA:
        register_model_metadata(_metadata(name, facts))
    return _deployment(name, facts.max_positions)


def _deployment(name: str, max_positions: int) -> ModelDeployment:
    return _complete(
        ModelDeployment(name=name, client_spec=ClientSpec(class_name=CLIENT_CLASS)), max_positions
    )


def _metadata(name: str, facts: ModelFacts) -> ModelMetadata:
    """The tags decide which run expanders apply; those that rewrite prompts for other vendors'
    models are left out.
    """
    tags = [TEXT_MODEL_TAG, FULL_FUNCTIONALITY_TEXT_MODEL_TAG]
    if facts.instruct:
        tags.append(INSTRUCTION_FOLLOWING_MODEL_TAG)
    return ModelMetadata(
        name=name,
        creator_organization_name="FlexGen-HELM",
        display_name=facts.display_name,
        description=f"{facts.display_name}, evaluated on this machine by FlexGen-HELM",
        access="open",
        release_date=None,
        tags=tags,
        num_parameters=facts.num_parameters or None,
    )


def make_tokenizer_config(name: str) -> TokenizerConfig:
    """Make the tokenizer of the deployment of the same name."""
    tokenizer = get_context().models.encoder(model_of_tokenizer(name)).tokenizer
    return _tokenizer_config(name, tokenizer.eos_text, prefix_token(tokenizer))


def _tokenizer_config(name: str, end_of_text: str | None, prefix: str | None) -> TokenizerConfig:
    spec = TokenizerSpec(class_name=TOKENIZER_CLASS)
    return TokenizerConfig(
        name=name, tokenizer_spec=spec, end_of_text_token=end_of_text, prefix_token=prefix
    )


def prefix_token(tokenizer: Tokenizer) -> str | None:
    """Return what precedes a document in language modelling: BOS where the model was trained with
    one.

    Chat tunes rename BOS and EOS to their turn marks. Where the vocabulary still has the base
    model's document separator, documents began with it in training.
    """
    if tokenizer.bos_id in tokenizer.prefix:
        return tokenizer.bos_text
    if len(tokenizer.encode(END_OF_TEXT, add_special_tokens=False)) == 1:
        return END_OF_TEXT
    return tokenizer.eos_text


def _complete(entry: ModelDeployment, max_positions: int) -> ModelDeployment:
    """Fill in what the entry leaves open.

    The last token of a request is never fed to the model, so a request may be one longer than the
    positions.
    """
    # Only names below `flexgen/` reach our tokenizer generator.
    tokenizer_name = (
        entry.name if entry.name.startswith(PREFIX) else PREFIX + entry.name.replace("/", "--")
    )
    return replace(
        entry,
        tokenizer_name=entry.tokenizer_name or tokenizer_name,
        window_service_spec=entry.window_service_spec or WindowServiceSpec(class_name=WINDOW_CLASS),
        max_sequence_length=max_positions,
        max_request_length=entry.max_request_length or max_positions + 1,
    )


def _model_of_entry(entry: ModelDeployment) -> ModelArguments:
    return get_context().find_model(entry.model_name or entry.name, entry.client_spec.args)


def model_of(deployment_name: str) -> ModelArguments | None:
    """Return the model behind a deployment, None if it is not ours."""
    entry = deployments.get_model_deployment(deployment_name)
    return _model_of_entry(entry) if entry.client_spec.class_name == CLIENT_CLASS else None


def model_of_tokenizer(name: str) -> ModelArguments:
    """Return the model whose tokenizer has this name: a deployment entry's, or the one the name
    itself means.
    """
    for entry in deployments.ALL_MODEL_DEPLOYMENTS:
        if entry.client_spec.class_name == CLIENT_CLASS and name in (
            entry.tokenizer_name,
            entry.name,
        ):
            return _model_of_entry(entry)
    return get_context().find_model(name)


def is_ours(entry: ModelDeployment | ModelMetadata | TokenizerConfig) -> bool:
    """Whether an entry is exactly what `flexgen-helm run` writes into `prod_env`, without any
    change by a user.

    Such an entry says what its name meant when it was written, which may not be what the user means
    now.
    """
    if not entry.name.startswith(PREFIX):
        return False
    if isinstance(entry, ModelDeployment):
        return entry.max_sequence_length is not None and entry == _deployment(
            entry.name, entry.max_sequence_length
        )
    if isinstance(entry, TokenizerConfig):
        return entry == _tokenizer_config(entry.name, entry.end_of_text_token, entry.prefix_token)
    is_instruct = INSTRUCTION_FOLLOWING_MODEL_TAG in entry.tags
    facts = ModelFacts(entry.display_name, 0, entry.num_parameters or 0, is_instruct)
    return replace(entry, deployment_names=None) == _metadata(entry.name, facts)


def complete_file_deployments() -> None:
    """Complete entries of `prod_env/model_deployments.yaml`, which need only a name and our client.

    A process that only shows results uses the entries unchanged: they describe the models of those
    results.

    HELM reads that file before it loads plugins. Values that the user wrote stay. Entries that
    `flexgen-helm run` wrote are dropped, and generated when they are looked up.
    """
    if not runs_scenarios():
        return
    context = get_context()
    # A name may mean another model than when its entry was written. Our generators answer for the
    # names that are used, as if there were no files; to look all of them up here would fetch models
    # from the hub.
    context.generate_once.cache_clear()
    listed = deployments.ALL_MODEL_DEPLOYMENTS
    by_name = deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT
    completed = context.completed_deployments
    registries: list[tuple[list[Any], dict[str, Any], Container[str]]] = [
        (listed, by_name, completed),
        (tokenizer_registry.ALL_TOKENIZER_CONFIGS, tokenizer_registry.TOKENIZER_NAME_TO_CONFIG, ()),
        # HELM wants metadata for each deployment that is left in its registry.
        (
            metadata_registry.ALL_MODELS_METADATA,
            metadata_registry.MODEL_NAME_TO_MODEL_METADATA,
            by_name,
        ),
    ]
    for entries, entry_of_name, kept in registries:
        entries[:] = [entry for entry in entries if entry.name in kept or not is_ours(entry)]
        for name, entry in list(entry_of_name.items()):
            if entry.name not in kept and is_ours(entry):
                del entry_of_name[name]
    for index, entry in enumerate(listed):
        optional = (entry.tokenizer_name, entry.max_sequence_length, entry.window_service_spec)
        if entry.client_spec.class_name != CLIENT_CLASS or None not in optional:
            continue
        try:
            model = _model_of_entry(entry)
            deployment = _complete(
                entry, entry.max_sequence_length or context.models.facts(model).max_positions
            )
        except FlexgenError as error:
            hwarn(f"The deployment {entry.name} cannot be used: {error}")
            continue
        completed.add(entry.name)
        listed[index] = by_name[entry.name] = deployment


@cache
def register() -> None:
    """Register once per process: HELM refuses a second generator for one prefix."""
    deployments.model_deployment_generator("flexgen")(
        lambda name: get_context().generate_once(make_deployment, name)
    )
    tokenizer_config_generator("flexgen")(
        lambda name: get_context().generate_once(make_tokenizer_config, name)
    )
    complete_file_deployments()
