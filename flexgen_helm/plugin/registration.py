"""What HELM's registries learn about `flexgen/…` names: deployments, metadata, tokenizers.

HELM calls a generator at every look-up and keeps nothing, so the results are kept here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark.model_deployment_registry import ClientSpec, ModelDeployment, WindowServiceSpec
from helm.benchmark.model_metadata_registry import (
    FULL_FUNCTIONALITY_TEXT_MODEL_TAG,
    INSTRUCTION_FOLLOWING_MODEL_TAG,
    MODEL_NAME_TO_MODEL_METADATA,
    TEXT_MODEL_TAG,
    ModelMetadata,
    register_model_metadata,
)
from helm.benchmark.tokenizer_config_registry import TokenizerConfig, TokenizerSpec, tokenizer_config_generator
from helm.common.hierarchical_logger import hwarn

from flexgen_helm.core.errors import FlexgenError
from flexgen_helm.plugin import models
from flexgen_helm.plugin.models import PREFIX, ModelArguments

if TYPE_CHECKING:
    from flexgen_helm.text.tokenizer import Tokenizer

# By name, because importing the classes would bring HELM's client and window machinery into every registration.
CLIENT_CLASS = "flexgen_helm.plugin.client.FlexgenClient"
TOKENIZER_CLASS = "flexgen_helm.plugin.tokenizer_client.FlexgenTokenizer"
WINDOW_CLASS = "flexgen_helm.plugin.tokenizer_client.FlexgenWindowService"
END_OF_TEXT = "<|endoftext|>"


@cache
def deployment(name: str) -> ModelDeployment:
    """The deployment `flexgen/…`; raises UnknownModelError with one sentence, which reaches the user."""
    model = models.find_model(name)
    if name not in MODEL_NAME_TO_MODEL_METADATA:
        register_model_metadata(metadata(name, model))
    return _complete(ModelDeployment(name=name, client_spec=ClientSpec(class_name=CLIENT_CLASS)), model)


def metadata(name: str, model: ModelArguments) -> ModelMetadata:
    """The tags decide run expanders; those that rewrite prompts for other vendors' models are left out."""
    facts = models.facts(model)
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
    return TokenizerConfig(
        name=name,
        tokenizer_spec=TokenizerSpec(class_name=TOKENIZER_CLASS),
        end_of_text_token=tokenizer.eos_text,
        prefix_token=_prefix_token(tokenizer),
    )


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


def _complete(given: ModelDeployment, model: ModelArguments) -> ModelDeployment:
    """Fill in what the entry leaves open.

    The last token of a request is never fed to the model, so a request may be one longer than the positions.
    """
    length = given.max_sequence_length or models.facts(model).max_positions
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


def complete_file_deployments() -> None:
    """Entries of `prod_env/model_deployments.yaml` need only a name and our client: the rest is filled in.

    HELM reads that file before it loads plugins. Values that the user wrote stay as they are.
    """
    for index, entry in enumerate(deployments.ALL_MODEL_DEPLOYMENTS):
        needed = (entry.tokenizer_name, entry.max_sequence_length, entry.window_service_spec)
        if entry.client_spec.class_name != CLIENT_CLASS or None not in needed:
            continue
        try:
            model = models.find_model(entry.model_name or entry.name, entry.client_spec.args)
            completed = _complete(entry, model)
        except FlexgenError as error:
            hwarn(f"The deployment {entry.name} cannot be used: {error}")
            continue
        deployments.ALL_MODEL_DEPLOYMENTS[index] = completed
        deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT[entry.name] = completed


@cache
def register() -> None:
    """Once a process, because HELM refuses a second generator for one prefix; later calls do nothing."""
    deployments.model_deployment_generator("flexgen")(deployment)
    tokenizer_config_generator("flexgen")(tokenizer_config)
    complete_file_deployments()
