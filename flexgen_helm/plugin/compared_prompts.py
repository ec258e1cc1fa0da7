"""The requests of a finished run in token ids, with their answers, for models to be compared on.

HELM's file of a run has texts. The response cache has token ids, under the keys of the requests. A
result is taken only if it is what the file says, to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from helm.common.request import Request

from flexgen_helm.checkpoint.suffixes import PREFIX
from flexgen_helm.engine.compared_prompts import ComparedPrompts
from flexgen_helm.errors import UsageError
from flexgen_helm.paths import state_dir
from flexgen_helm.plugin.context import get_context
from flexgen_helm.plugin.convert import (
    HelmRequest,
    PlainTextRequest,
    parse_request,
    to_helm_request,
    to_request_result,
)
from flexgen_helm.report.run_folder import read_states
from flexgen_helm.report.scores import RunScores
from flexgen_helm.request import GenerationResult
from flexgen_helm.response_cache import ResponseCache, response_cache_path
from flexgen_helm.service.models import ModelArguments, PromptEncoder
from flexgen_helm.units import count


def read_compared_prompts(run: RunScores) -> ComparedPrompts:
    """Return prompts and answers of the instances that HELM scored, with the tokens that make their
    scores.

    - Generated: the tokens of the answer, of several completions those of the first.
    - A choice that was scored: its last tokens, as many as HELM counts.
    - Text that was scored: all tokens behind those that HELM takes as context.

    Instances with a perturbation and requests that failed are left out.
    Raises `UsageError` for an answer that is not in the response cache as the run has it.
    """
    assert run.folder is not None
    context = get_context()
    model = context.find_model(f"{PREFIX}{run.record['model']}")
    encoder = context.models.encoder(model)
    # `index` has the scored instances alone: none with a perturbation.
    states = [
        state
        for state in read_states(run.folder, run.instances.index)
        if state["result"]["success"]
    ]
    answered = _stored_results(run, model, states)
    if missing := len(states) - len(answered):
        raise UsageError(
            f"{count(missing, 'answer')} of {len(states):,} of {run.name} "
            f"{'is' if missing == 1 else 'are'} not in the response cache as the run has them; "
            "make the run again with flexgen-helm run, without --disable-cache"
        )
    token_ids, compared, documents = [], [], []
    for index, state in enumerate(states):
        ids, first = _scored_tokens(state, *answered[index], encoder)
        if first < len(ids):
            token_ids.append(ids)
            compared.append(range(first, len(ids)))
            documents.append(state["instance"]["id"])
    return ComparedPrompts(token_ids, compared, documents)


def _stored_results(
    run: RunScores, model: ModelArguments, states: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[HelmRequest, GenerationResult]]:
    """Return the request and the result of each state that the response cache has, by index."""
    models, path = get_context().models, response_cache_path(state_dir(), run.record["fingerprint"])
    if not path.exists():
        return {}
    stored = {}
    requests = [recorded_request(run, state) for state in states]
    converted = [to_helm_request(request, model, models) for request in requests]
    with closing(ResponseCache(path)) as cache:
        results = cache.get_many([helm_request.key for helm_request in converted])
    for index, helm_request in enumerate(converted):
        if (result := results.get(helm_request.key)) is not None:
            shown = to_request_result(
                requests[index], helm_request, result, True, models.encoder(model)
            )
            recorded_outputs = [
                (output["text"], output["logprob"])
                for output in states[index]["result"]["completions"]
            ]
            if recorded_outputs == [(output.text, output.logprob) for output in shown.completions]:
                stored[index] = helm_request, result
    return stored


def recorded_request(run: RunScores, state: Mapping[str, Any]) -> Request:
    """Return a request of a run from its state; a run whose requests go through no chat template
    has no record of one.
    """
    text_class = PlainTextRequest if run.record.get("chat_template") is None else Request
    return parse_request(state["request"], text_class)


def _scored_tokens(
    state: Mapping[str, Any], request: HelmRequest, result: GenerationResult, encoder: PromptEncoder
) -> tuple[tuple[int, ...], int]:
    """Return prompt and answer, and the index of the first token that makes the score."""
    prompt = result.prompt_token_ids
    ids = prompt + (result.completions[0].token_ids if result.completions else ())
    if not state["request"]["echo_prompt"]:
        return ids, max(1, len(prompt))
    if (reference := state.get("reference_index")) is not None:
        # As HELM's BasicReferenceMetric counts the tokens of a reference.
        text = state["instance"]["references"][reference]["output"]["text"]
        return ids, max(1, len(ids) - len(encoder.encode(f" {text}")))
    return ids, max(
        1, len(prompt) - len(request.echo_ids) + state.get("num_conditioning_tokens", 0)
    )
