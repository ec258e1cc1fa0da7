"""A random small model of the same kind as one that is opened, computed by `transformers` on the
host and by the engine, both in float32; and how far their log-probabilities are apart.

The small model goes through the ways that an evaluation takes: prompts of mixed lengths, longer
than its windows, of which some share a beginning; more than one block; several steps
(docs/explanation/exactness.md). A GPU runs it twice: all on the GPU, and with a third on each tier.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flexgen_helm.checkpoint.open import open_as
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.kernel_checks import compare_kernels, largest_magnitude
from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.pipeline import Pipeline
from flexgen_helm.errors import FlexgenError
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.miniature import MAX_WEIGHTS, VOCABULARY, WINDOW, miniatures
from flexgen_helm.offload.copy_engine import CudaCopyEngine
from flexgen_helm.paths import state_dir
from flexgen_helm.planner.policy import Policy
from flexgen_helm.progress import silenced
from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.prepare import token_refusal
from flexgen_helm.system_errors import system_error

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Of random weights and requests: a difference is believed if two of three show it.
SEEDS = (0, 1, 2)
# How the names of folders begin that a killed process leaves in the home folder.
FOLDER_PREFIX = "proof-"
HOST = torch.device("cpu")
# Standard deviation of the small model's weights, with which every part moves log-probabilities.
_DEVIATION = 0.25
# Sequences of a batch, and batches of a block: fewer than there are requests.
_BLOCK = Policy(3, 2)
_DEVICE_BLOCKS = Policy(3, 2, 1, 0, 1, 0, 1, 0), Policy(3, 2, *(0.3,) * 6)
_STEPS = 4
# Whether the engine that is opened here is itself part of a proof.
is_proving: ContextVar[bool] = ContextVar("is_proving", default=False)


def difference_of_miniature(
    content: Mapping[str, Any],
    config: ModelConfig,
    seed: int,
    engine_class: type[Engine],
    device: torch.device = HOST,
) -> float:
    """Return the largest difference of a log-probability, in nats, of a small model between an
    engine and `transformers`.

    content, config: the `config.json` of the model that is opened, and as we read it.
    device: the engine's; `transformers` computes on the host.
    """
    requests = trial_requests(seed)
    with small_model(content, config, seed) as (reference, opened):
        placed = [opened] if device.type == "cpu" else _on_device(opened, device)
        return max(largest_difference(reference, model, requests, engine_class) for model in placed)


def _on_device(opened: OpenedModel, device: torch.device) -> Iterator[OpenedModel]:
    """Open a small model on a GPU: all of it there, and a third on each tier."""
    checkpoint = opened.checkpoint
    assert checkpoint.folder is not None
    # Before the engine is opened, which would do it silenced: its message must be heard.
    compare_kernels(device, torch.float32, opened.precision, checkpoint.config.head_dim)
    for policy in _DEVICE_BLOCKS:
        options = replace(
            opened.options,
            policy=policy,
            device=str(device),
            offload_dir=checkpoint.folder / "offload",
        )
        yield replace(
            opened,
            options=options,
            device=device,
            link=CudaCopyEngine(device),
            given_dtype=torch.float32,
        )


@contextmanager
def small_model(
    content: Mapping[str, Any], config: ModelConfig, seed: int
) -> Iterator[tuple[Any, OpenedModel]]:
    """Make a random small model of a kind in a folder that is removed afterwards; yield it as
    transformers' module, and opened.

    Raises `FlexgenError` if no small model has every kind of layer, or it cannot be written.
    """
    with _quiet_transformers():
        for cls, small in miniatures(content, config):
            with torch.device("meta"):
                model = cls._from_config(small, attn_implementation="eager", dtype=torch.float32)
            if (
                sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
                <= MAX_WEIGHTS
            ):
                with torch.random.fork_rng(devices=[]), _temporary_folder() as folder:
                    try:
                        model = random_reference(cls, small, seed, Path(folder))
                    except Exception as error:
                        if (system := system_error(error)) is None:
                            raise
                        system.filename = system.filename or str(folder)
                        raise FlexgenError(
                            "the small model that the model is compared with cannot be written to "
                            f"{folder}: {system.strerror}"
                        ) from system
                    checkpoint = open_as(type(config), Path(folder))
                    options = EngineConfig(policy=_BLOCK, device="cpu", generation_config="ignore")
                    opened = OpenedModel(
                        "",
                        options,
                        checkpoint,
                        tokenizer=None,
                        chat=None,
                        device=HOST,
                        link=None,
                    )
                    yield model, opened
                    return
    raise FlexgenError(f"no small configuration has all {config.num_layers} layers' kinds")


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for the small model, in the home; where that cannot be written, in the
    system's.
    """
    home = state_dir()
    is_writable = home.is_dir() and os.access(home, os.W_OK)
    return tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=home if is_writable else None)


def random_reference(cls: Any, config: Any, seed: int, folder: Path) -> Any:
    """Save a random model in 16 bits; return it in float32, with the same values.

    Of buffers, biases alone are random: others, such as MiniMax's decays, belong together.
    """
    torch.manual_seed(seed)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                if isinstance(tensor, nn.Parameter) or tensor.dim() == 1:
                    tensor.normal_(0.0, _DEVIATION)
                tensor.copy_(tensor.half().float())
    values = model.state_dict()
    stored = {name: x.half() if x.is_floating_point() else x for name, x in values.items()}
    # transformers saves on the first rank of a pipeline only; each of ours proves what its own
    # machine has.
    model.should_save_on_this_rank = lambda is_main_process: is_main_process
    model.save_pretrained(folder, state_dict=stored)
    return model


def trial_requests(seed: int) -> list[GenerationRequest]:
    """Return prompts of mixed lengths around a window, some with a common beginning; more than a
    block has.

    Some have the last token of the vocabulary, which means padding where `miniature` chooses its
    id.
    """
    generator = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(3, VOCABULARY - 3) for _ in range(count)]

    shared, last = tokens(2 * WINDOW + 3), VOCABULARY - 1
    prompts = [
        [last], [*shared, *tokens(5)], tokens(WINDOW - 1), [*shared, last], tokens(3 * WINDOW + 2),
        [*shared, *tokens(2 * WINDOW)], tokens(2), [last, *tokens(WINDOW)],
        [*shared[:WINDOW], *tokens(6)],
    ]  # fmt: skip
    return [
        GenerationRequest(
            prompt_token_ids=prompt, max_tokens=_STEPS, echo_logprobs=True, ignore_eos=True
        )
        for prompt in prompts
    ]


def largest_difference(
    reference: Any,
    opened: OpenedModel,
    requests: Sequence[GenerationRequest],
    engine_class: type[Engine],
) -> float:
    """Return the largest difference of a log-probability, in nats, between a model of transformers
    and the same one opened.

    Raises `FlexgenError` for the first error of a request. Requests that have drawn a token which
    no text can have are left out, and are an error only if they are half of all or more.
    """
    with opened_engine(engine_class, opened) as engine:
        results = engine.run(requests)
    largest, config = 0.0, opened.checkpoint.config
    refused = str(token_refusal([*config.refused_ids], config))
    answered = [
        (request, result)
        for request, result in zip(requests, results)
        if result.error is None or str(result.error) != refused
    ]
    if len(answered) <= len(results) // 2:
        raise FlexgenError(refused)
    for request, result in answered:
        if result.error is not None:
            raise FlexgenError(str(result.error))
        prompt, answer = list(request.prompt_token_ids or ()), result.completions[0]
        with torch.no_grad():
            input_ids = torch.tensor([[*prompt, *answer.token_ids]])
            logits = reference(input_ids=input_ids).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)
        scores = [*(result.prompt_logprobs or ())[1:], *answer.logprobs]
        tokens = torch.tensor([*prompt[1:], *answer.token_ids])
        expected = logprobs[:-1].gather(1, tokens[:, None]).squeeze(1)
        # By how much a chosen token is less probable than the most probable one.
        drawn = slice(len(prompt) - 1, None)
        shortfall = logprobs[drawn][:-1].amax(1) - expected[drawn]
        found = torch.tensor(
            [math.nan if score is None else score for score in scores], dtype=torch.float32
        )
        largest = max(largest, *map(largest_magnitude, (found - expected, shortfall)))
    return largest


@contextmanager
def opened_engine(engine_class: type[Engine], opened: OpenedModel) -> Iterator[Engine]:
    """Load a small model, whose requests share every beginning."""
    token = is_proving.set(True)
    try:
        with silenced(), engine_class(opened, Pipeline()) as engine:
            engine.share_every_beginning()
            yield engine
    finally:
        is_proving.reset(token)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep what `transformers` says of the small model from the terminal."""
    from transformers.utils import logging

    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
