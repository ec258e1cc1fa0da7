"""What HELM's registries learn about `flexgen/…` names: deployments, metadata, tokenizers.

HELM calls a generator at every look-up and keeps nothing, so the results are kept here.
"""

from __future__ import annotations

from collections.abc import Callable
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
from helm.benchmark.tokenizer_config_registry import TokenizerConfig, TokenizerSpec, tokenizer_config_generator
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.errors import FlexgenError
from flexgen_helm.plugin import models
from flexgen_helm.plugin.models import PREFIX, ModelArguments, ModelFacts

if TYPE_CHECKING:
    from flexgen_helm.tokenizer.tokenizer import Tokenizer

# By name, because importing the classes would bring HELM's client and window machinery into every registration.
CLIENT_CLASS = "flexgen_helm.plugin.client.FlexgenClient"
TOKENIZER_CLASS = "flexgen_helm.plugin.tokenizer_client.FlexgenTokenizer"
WINDOW_CLASS = "flexgen_helm.plugin.tokenizer_client.FlexgenWindowService"
END_OF_TEXT = "<|endoftext|>"


@cache
def deployment(name: str) -> ModelDeployment:
    """The deployment `flexgen/…`; raises UnknownModelError with one sentence, which reaches the user."""
    model = models.find_model(name)
    if name not in metadata_registry.MODEL_NAME_TO_MODEL_METADATA:
        register_model_metadata(metadata(name, model))
    return _generated(name, models.facts(model).max_positions)


def _generated(name: str, length: int) -> ModelDeployment:
    return _complete(ModelDeployment(name=name, client_spec=ClientSpec(class_name=CLIENT_CLASS)), length)


def metadata(name: str, model: ModelArguments) -> ModelMetadata:
    return _metadata(name, models.facts(model))


def _metadata(name: str, facts: ModelFacts) -> ModelMetadata:
    """The tags decide run expanders; those that rewrite prompts for other vendors' models are left out."""
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
        num_parameters=facts.num_parameters,
    )


@cache
def tokenizer_config(name: str) -> TokenizerConfig:
    """The tokenizer of the deployment of the same name."""
    tokenizer = models.tokenizer(model_of_tokenizer(name))
    return _tokenizer_config(name, tokenizer.eos_text, _prefix_token(tokenizer))


def _tokenizer_config(name: str, end_of_text: str | None, prefix: str | None) -> TokenizerConfig:
    spec = TokenizerSpec(class_name=TOKENIZER_CLASS)
    return TokenizerConfig(name=name, tokenizer_spec=spec, end_of_text_token=end_of_text, prefix_token=prefix)


def _prefix_token(tokenizer: Tokenizer) -> str | None:
    """What stands before a document in language modelling: BOS where the model was trained with one.

    Chat tunes rename BOS and EOS to their turn marks; the base model's document separator, where the vocabulary
    still has it, is what a document began with in training.
    """
    if tokenizer.adds_bos:
        return tokenizer.bos_text
    if len(tokenizer.encode(END_OF_TEXT, add_special_tokens=False)) == 1:
        return END_OF_TEXT
    return tokenizer.eos_text


def _complete(given: ModelDeployment, length: int) -> ModelDeployment:
    """Fill in what the entry leaves open.

    The last token of a request is never fed to the model, so a request may be one longer than the positions.
    """
    # Only names below `flexgen/` come to our tokenizer generator.
    own_name = given.name if given.name.startswith(PREFIX) else PREFIX + given.name.replace("/", "--")
    return replace(
        given,
        tokenizer_name=given.tokenizer_name or own_name,
        window_service_spec=given.window_service_spec or WindowServiceSpec(class_name=WINDOW_CLASS),
        max_sequence_length=length,
        max_request_length=given.max_request_length or length + 1,
    )


def model_of(deployment_name: str) -> ModelArguments | None:
    """The model behind a deployment, None where it is not ours."""
    found = deployments.get_model_deployment(deployment_name)
    if found.client_spec.class_name != CLIENT_CLASS:
        return None
    return models.find_model(found.model_name or found.name, found.client_spec.args)


def model_of_tokenizer(name: str) -> ModelArguments:
    """The model whose tokenizer has this name: a deployment entry's, or the one the name itself means."""
    for entry in deployments.ALL_MODEL_DEPLOYMENTS:
        if entry.client_spec.class_name == CLIENT_CLASS and name in (entry.tokenizer_name, entry.name):
            return models.find_model(entry.model_name or entry.name, entry.client_spec.args)
    return models.find_model(name)


def is_ours(entry: ModelDeployment | ModelMetadata | TokenizerConfig) -> bool:
    """Whether an entry has the form that `flexgen-helm run` writes into `prod_env`, and nothing that a user added.

    Such an entry is no word of the user's: it says what its name meant when it was written.
    """
    if not entry.name.startswith(PREFIX):
        return False
    if isinstance(entry, ModelDeployment):
        return bool(entry.max_sequence_length) and entry == _generated(entry.name, entry.max_sequence_length or 0)
    if isinstance(entry, TokenizerConfig):
        return entry == _tokenizer_config(entry.name, entry.end_of_text_token, entry.prefix_token)
    instruct = INSTRUCTION_FOLLOWING_MODEL_TAG in entry.tags
    facts = ModelFacts(entry.display_name, 0, entry.num_parameters or 0, instruct)
    return replace(entry, deployment_names=None) == _metadata(entry.name, facts)


_completed: set[str] = set()  # deployments of the user's that have that form only because they were completed


def _forget_our_entries() -> None:
    """Take out of HELM's registries what earlier runs wrote into `prod_env`.

    A name may mean another model by now; our generators say which, as if there were no files. They are asked for
    names that are used: to look all of them up here would fetch models from the hub.
    """
    deployment.cache_clear()
    tokenizer_config.cache_clear()
    listed, by_name = deployments.ALL_MODEL_DEPLOYMENTS, deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT
    _drop(listed, by_name, lambda entry: entry.name not in _completed and is_ours(entry))
    configs, config_by_name = tokenizer_registry.ALL_TOKENIZER_CONFIGS, tokenizer_registry.TOKENIZER_NAME_TO_CONFIG
    _drop(configs, config_by_name, is_ours)
    known, known_by_name = metadata_registry.ALL_MODELS_METADATA, metadata_registry.MODEL_NAME_TO_MODEL_METADATA
    # HELM wants metadata for each deployment in its registry.
    _drop(known, known_by_name, lambda entry: entry.name not in by_name and is_ours(entry))


def _drop(listed: list[Any], by_name: dict[str, Any], unwanted: Callable[[Any], bool]) -> None:
    listed[:] = [entry for entry in listed if not unwanted(entry)]
    for name in [name for name, entry in by_name.items() if unwanted(entry)]:
        del by_name[name]


def complete_file_deployments() -> None:
    """Entries of `prod_env/model_deployments.yaml` need only a name and our client: the rest is filled in.

    HELM reads that file before it loads plugins. Values that the user wrote stay as they are; entries that
    `flexgen-helm run` wrote are made anew when they are asked for.
    """
    _forget_our_entries()
    for index, entry in enumerate(deployments.ALL_MODEL_DEPLOYMENTS):
        needed = (entry.tokenizer_name, entry.max_sequence_length, entry.window_service_spec)
        if entry.client_spec.class_name != CLIENT_CLASS or None not in needed:
            continue
        try:
            model = models.find_model(entry.model_name or entry.name, entry.client_spec.args)
            completed = _complete(entry, entry.max_sequence_length or models.facts(model).max_positions)
        except FlexgenError as error:
            hwarn(f"The deployment {entry.name} cannot be used: {error}")
            continue
        _completed.add(entry.name)
        deployments.ALL_MODEL_DEPLOYMENTS[index] = completed
        deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT[entry.name] = completed


@cache
def register() -> None:
    """Once a process, because HELM refuses a second generator for one prefix; later calls do nothing."""
    deployments.model_deployment_generator("flexgen")(deployment)
    tokenizer_config_generator("flexgen")(tokenizer_config)
    complete_file_deployments()
