"""A model proves itself where it is opened: a small one of its kind equals `transformers`, or it is
refused.

    key            what decides: kind of configuration, class, files of transformers, our models/,
                   torch; on a GPU also the GPU, its driver, and our modules that compute or copy
                   there
    proved         by CI (`proved.json`), or here before (`proofs.json` in the home folder): nothing
                   is computed
    else           a small model runs, whole by `transformers` on the host, and by the engine, both
                   in float32
    equal          with the first seed: remembered; else two more are tried, and if two of three
                   differ: refused by name

The small model goes through the ways that an evaluation takes: prompts of mixed lengths, longer
than its windows, of which some share a beginning; more than one block; several steps
(docs/explanation/exactness.md). A GPU runs it twice:
all on the GPU, and with a third on each tier. What it does not reach there, kernels of 16 bits and
of packed weights, every process compares with plain PyTorch before it uses it (`compare_kernels`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flexgen_helm.checkpoint.open import open_as
from flexgen_helm.checkpoint.paths import read_state, state_dir, state_lock, update_state
from flexgen_helm.checkpoint.system_errors import system_error
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.loop_attention import has_packed_steps
from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.pipeline import Pipeline
from flexgen_helm.engine.sampler import log_normalizers
from flexgen_helm.errors import FlexgenError, Interrupted, UnprovedModelError, UsageError
from flexgen_helm.hardware.fast_paths import ATTENTION, TRITON, switch_off
from flexgen_helm.identity import own_digest
from flexgen_helm.kernels.attention import can_attend_caches
from flexgen_helm.kernels.vector_products import multiplies_as_stored
from flexgen_helm.models.attention import AttentionConfig, additive_mask, attend, attend_unfused
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.miniature import MAX_WEIGHTS, VOCABULARY, WINDOW, kind_text, miniatures
from flexgen_helm.offload.copy_engine import CudaCopyEngine
from flexgen_helm.planner.policy import Policy
from flexgen_helm.progress import ProgressPhase, report, silenced
from flexgen_helm.quant.block_products import decode_into
from flexgen_helm.quant.dequantization import dequantize_into, dequantize_with_torch
from flexgen_helm.quant.formats import BlockFormat, StoredFormat
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import Precision
from flexgen_helm.request import GenerationRequest
from flexgen_helm.scheduling.prepare import token_refusal

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

TOLERANCE = 1e-4
_HOST = torch.device("cpu")
# Of a GPU, whose libraries sum in other orders; and of its attention, relative to the largest
# value.
_DEVICE_TOLERANCE = 1e-3
_ATTENTION_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SEEDS = (0, 1, 2)
# Standard deviation of the small model's weights, with which every part moves log-probabilities.
_DEVIATION = 0.25
# Sequences of a batch, and batches of a block: fewer than there are requests.
_BLOCK = Policy(3, 2)
_DEVICE_BLOCKS = Policy(3, 2, 1, 0, 1, 0, 1, 0), Policy(3, 2, *(0.3,) * 6)
_STEPS = 4
# Logits of rows that are added up alone and together.
_TRIAL_LOGITS = 1 << 23
_PROOFS, _SCRATCH = "proofs.json", "proof-"
_TABLE = Path(__file__).with_name("proved.json")
# Whether the engine that is opened here is itself part of a proof.
_is_proving: ContextVar[bool] = ContextVar("is_proving", default=False)


@dataclass(frozen=True)
class ProofKey:
    """What decides whether a model's values are right.

    class_name: of `transformers`, or the architecture of a record of our own.
    code: digest of `transformers`' files; "" where a record of our own computes.
    kind: of the configuration (`kind_text`).
    device: all else that decides on a GPU; "" where the host computes.
    """

    class_name: str
    code: str
    kind: str
    device: str = ""

    @property
    def digest(self) -> str:
        """A name for all that decides; our own modules and PyTorch included."""
        parts = [
            self.class_name,
            self.code,
            self.kind,
            own_digest("models"),
            torch.__version__.partition("+")[0],
        ]
        parts += [self.device] if self.device else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def proof_key(
    content: Mapping[str, Any], config: ModelConfig, device: torch.device = _HOST
) -> ProofKey:
    """content: of `config.json`."""
    return ProofKey(
        config.class_name, config.values_digest, kind_text(content), _device_text(device)
    )


@cache
def _device_text(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    driver = Path("/proc/driver/nvidia/version")
    return "; ".join(
        (
            torch.cuda.get_device_name(device),
            driver.read_text(encoding="utf-8").partition("\n")[0] if driver.is_file() else "",
            *map(own_digest, ("engine", "kernels", "kv_cache", "offload")),
        )
    )


@cache
def proved_table() -> dict[str, Any]:
    """Return `proved.json`: `digests` that CI has proved, and `tested`, releases by package."""
    table: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table


def require_proof(model: OpenedModel, engine: type[Engine]) -> bool | None:
    """Prove a model where that has not been done, and return whether it is; None where there is
    nothing to compare.

    With `--unverified` nothing is computed, and what is not proved passes.

    engine: computes the small model; it opens models itself, and so is no import of this module.
    Raises `UnprovedModelError` for a model that differs from `transformers`, or cannot be compared.
    """
    content = model.checkpoint.config_content
    # GGUF files have no such configuration, dummy weights no values
    if content is None or _is_proving.get():
        return None
    key = proof_key(content, model.checkpoint.config, model.device)
    if is_proved(key):
        return True
    if model.options.unverified:
        return False
    with _one_process_at_a_time():
        if not is_proved(key):  # by another process meanwhile
            report(ProgressPhase("prove", model.name))
            _prove(key, content, model, engine)
    return True


@contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Let other processes with the same home wait; in a home that cannot be written, each proves
    for itself.
    """
    with state_lock(f"{_PROOFS}.running"):
        for left in state_dir().glob(f"{_SCRATCH}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield


def is_proved(key: ProofKey) -> bool:
    return key.digest in proved_table()["digests"] or key.digest in read_state(_PROOFS)


def _prove(
    key: ProofKey, content: Mapping[str, Any], model: OpenedModel, engine: type[Engine]
) -> None:
    config, name, device = model.checkpoint.config, model.name, model.device
    tolerance = TOLERANCE if device.type == "cpu" else _DEVICE_TOLERANCE
    differences: list[float] = []
    for seed in SEEDS:
        try:
            differences.append(difference_of_miniature(content, config, seed, engine, device))
        except Interrupted:
            raise
        except Exception as error:  # whatever building or running a model raises
            if system_error(error):
                raise
            reason = str(error).partition("\n")[0][:200] or type(error).__name__
            raise _refusal(
                key, name, f"could not be compared with transformers' own forward pass: {reason}"
            ) from error
        if differences[0] < tolerance:  # of the first seed
            break
    wrong = [found for found in differences if not found < tolerance]
    if len(wrong) > 1:
        largest = max(filter(math.isfinite, wrong), default=math.nan)
        raise _refusal(
            key, name, f"differs from transformers' own forward pass by up to {largest:.2g} nats"
        )
    proved = {"class": key.class_name, "difference": min(differences), **_versions()}
    update_state(_PROOFS, lambda content: content.update({key.digest: proved}))


def _refusal(key: ProofKey, name: str, what: str) -> UnprovedModelError:
    versions = " and ".join(f"{package} {version}" for package, version in _versions().items())
    known, where, advice = proved_table()["tested"], "", ""
    if key.device:
        where, advice = " on this GPU", "take --device cpu, "
    return UnprovedModelError(
        f"{name} ({key.class_name}) is not computed with {versions}{where}: a small model of its "
        f"kind {what}; install transformers {known['transformers'][-1]} with torch "
        f"{known['torch'][-1]}, which are tested, {advice}or add --unverified to compute it all "
        "the same"
    )


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("transformers", "torch")}


def require_batch_invariance(model: OpenedModel, engine: type[Engine]) -> None:
    """Compute requests to a small model of the same kind alone and together, and compare bits.

    Raises `UsageError` where they differ, or where it is known that bits follow the batch.
    """
    cache, checkpoint = model.precision.cache, model.checkpoint
    why = ""
    if model.device.type != "cpu" or model.is_simulated:
        why = "products of a GPU follow the number of rows; take --device cpu"
    elif cache is not None and not has_packed_steps(cache):
        why = (
            f"attention to the KV cache of {model.precision.name} follows the batch; take 4bit, "
            "8bit or fp16"
        )
    elif not can_attend_caches(model.device, torch.float32) or not multiplies_as_stored(
        torch.float16
    ):
        why = "compiled loops do not work here, and PyTorch's sums follow the batch"
    elif not _sums_alike(checkpoint.config.vocab_size, torch.get_num_threads()):
        why = "PyTorch's sums over the vocabulary follow the batch"
    elif checkpoint.config_content is not None and not _is_proving.get():
        report(ProgressPhase("prove", model.name))
        with (
            _small_model(checkpoint.config_content, checkpoint.config, SEEDS[0]) as (_, opened),
            _opened(
                engine, replace(opened, options=replace(opened.options, batch_invariant=True))
            ) as small,
        ):
            asked = trial_requests(SEEDS[0])
            together = [(result.prompt_logprobs, result.completions) for result in small.run(asked)]
            alone = [small.run([request])[0] for request in asked]
        if together != [(result.prompt_logprobs, result.completions) for result in alone]:
            why = (
                f"a small model of its class, {checkpoint.config.class_name}, has other bits alone "
                "than in company"
            )
    if why:
        raise UsageError(f"--batch-invariant does not hold for {model.name}: {why}")


@cache
def _sums_alike(vocab_size: int, num_threads: int) -> bool:
    """Return whether rows of this vocabulary have the same log-sum-exp alone and together.

    num_threads: that PyTorch computes with now.
    """
    rows = torch.randn(
        (_TRIAL_LOGITS // vocab_size, vocab_size), generator=torch.Generator().manual_seed(0)
    )
    return torch.equal(
        log_normalizers(rows), torch.cat([log_normalizers(row) for row in rows.split(1)])
    )


def difference_of_miniature(
    content: Mapping[str, Any],
    config: ModelConfig,
    seed: int,
    engine: type[Engine],
    device: torch.device = _HOST,
) -> float:
    """Return the largest difference of a log-probability of a small model, `engine` against
    `transformers`.
    """
    asked = trial_requests(seed)
    with _small_model(content, config, seed) as (model, opened):
        if device.type == "cpu":
            return largest_difference(model, opened, asked, engine)
        return max(
            largest_difference(model, there, asked, engine) for there in _on_device(opened, device)
        )


def _on_device(opened: OpenedModel, device: torch.device) -> Iterator[OpenedModel]:
    """Open a small model on a GPU: all of it there, and a third on each tier."""
    checkpoint = opened.checkpoint
    assert checkpoint.folder is not None
    # what it says is heard here
    compare_kernels(device, torch.float32, opened.precision, checkpoint.config.head_dim)
    for policy in _DEVICE_BLOCKS:
        options = replace(
            opened.options,
            policy=policy,
            device=str(device),
            offload_dir=checkpoint.folder / "offload",
        )
        link = CudaCopyEngine(device)
        yield replace(opened, options=options, device=device, link=link, given_dtype=torch.float32)


def compare_kernels(
    device: torch.device, dtype: torch.dtype, precision: Precision, head_dim: int
) -> None:
    """Compare fast kernels of a GPU with plain PyTorch there, before results need them; switch off
    what differs.

    dtype: of products. Once in a process for each format, and for each size of heads.
    """
    formats = {precision.weights, precision.tables, *precision.published.by_name.values()}
    if precision.cache is not None:
        formats |= {precision.cache.keys, precision.cache.values}
    for fmt in formats - {None}:
        if not _dequantizes_alike(device, dtype, fmt):
            switch_off(TRITON, "a dequantized matrix has wrong bits")
    if fault := _attention_fault(device, dtype, head_dim):
        switch_off(ATTENTION, fault)


@cache
def _dequantizes_alike(device: torch.device, dtype: torch.dtype, fmt: StoredFormat) -> bool:
    rows, width, draw = 192, 2048, torch.Generator().manual_seed(0)
    found, expected = (torch.empty(rows, width, dtype=dtype, device=device) for _ in range(2))
    if isinstance(fmt, BlockFormat):  # any bytes, of scales that are no numbers too
        packed = torch.randint(
            256, (rows, fmt.stripe_bytes(width)), dtype=torch.uint8, generator=draw
        ).to(device)
        decode_into(packed, fmt, expected)
    else:
        packed = quantize(torch.randn(rows, width, generator=draw), fmt).to(device)
        dequantize_with_torch(packed, fmt, expected)
    dequantize_into(packed, fmt, found)
    return torch.equal(found.nan_to_num(), expected.nan_to_num())


@cache
def _attention_fault(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Say what is wrong with outputs or log-sum-exps of fused attention; "" for nothing."""
    draw, config, largest = torch.Generator().manual_seed(0), AttentionConfig(head_dim**-0.5), 0.0
    # A prompt, decoding sequences, and those behind a window.
    for batch, queries, keys, hides in ((1, 70, 70, False), (3, 1, 130, False), (3, 1, 130, True)):
        shapes = [(batch, 4, tokens, head_dim) for tokens in (queries, keys, keys)]
        q, k, v = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
        hidden = (torch.arange(keys, device=device) < keys // 3).expand(batch, 1, 1, keys)
        mask = additive_mask(hidden, dtype) if hides else None
        try:
            found = attend(q, (k, v), config, queries > 1, mask)
        # of another PyTorch's private operators
        except (AttributeError, TypeError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return f"{type(error).__name__}: {error}".splitlines()[0]
        exact = None if mask is None else mask.float()
        keys_values = k.float(), v.float()
        expected = attend_unfused(q.float(), keys_values, config, queries > 1, exact)
        for value, known in zip(found, expected):
            largest = max(largest, _largest(value.float() - known) / _largest(known))
    return (
        f"wrong by {largest:.2g} of the largest value"
        if largest > _ATTENTION_TOLERANCE[dtype]
        else ""
    )


@contextmanager
def _small_model(
    content: Mapping[str, Any], config: ModelConfig, seed: int
) -> Iterator[tuple[Any, OpenedModel]]:
    """Make a random small model of a kind: of transformers, and opened.

    Raises `FlexgenError` if no small model has every kind of layer.
    """
    with _quiet_transformers():
        for cls, small in miniatures(content, config):
            with torch.device("meta"):
                model = cls._from_config(small, attn_implementation="eager", dtype=torch.float32)
            if (
                sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
                <= MAX_WEIGHTS
            ):
                with torch.random.fork_rng(devices=[]), _trial_folder() as folder:
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
                        device=torch.device("cpu"),
                        link=None,
                    )
                    yield model, opened
                    return
    raise FlexgenError(f"no small configuration has all {config.num_layers} layers' kinds")


def _trial_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for the small model, in the home; where that cannot be written, in the
    system's.
    """
    home = state_dir()
    is_writable = home.is_dir() and os.access(home, os.W_OK)
    return tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=home if is_writable else None)


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
    """Prompts of mixed lengths around a window, some with a common beginning; more than a block
    has.

    Some have the last token of the vocabulary, which means padding where `miniature` chooses its
    id.
    """
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, VOCABULARY - 3) for _ in range(count)]

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
    model: Any, opened: OpenedModel, asked: Sequence[GenerationRequest], engine: type[Engine]
) -> float:
    """Return the largest difference of a log-probability between a model of transformers, and the
    same one opened.
    """
    with _opened(engine, opened) as small:
        results = small.run(asked)
    largest, config = 0.0, opened.checkpoint.config
    refused = str(token_refusal([*config.refused_ids], config))
    # Without answers that went on behind such a token.
    answered = [
        pair
        for pair in zip(asked, results)
        if pair[1].error is None or str(pair[1].error) != refused
    ]
    if len(answered) <= len(results) // 2:
        raise FlexgenError(refused)
    for request, result in answered:
        if result.error is not None:
            raise FlexgenError(str(result.error))
        prompt, answer = list(request.prompt_token_ids or ()), result.completions[0]
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([prompt + list(answer.token_ids)])).logits[0].float()
            )
        logprobs = torch.log_softmax(logits, -1)
        scores = [*(result.prompt_logprobs or ())[1:], *answer.logprobs]
        tokens = torch.tensor([*prompt[1:], *answer.token_ids])
        expected = logprobs[:-1].gather(1, tokens[:, None]).squeeze(1)
        steps = logprobs[len(prompt) - 1 : -1]
        # By how much a chosen token is less probable than the most probable one.
        shortfall = steps.amax(1) - steps.gather(
            1, torch.tensor(answer.token_ids)[:, None]
        ).squeeze(1)
        found = torch.tensor(
            [math.nan if score is None else score for score in scores], dtype=torch.float32
        )
        largest = max(largest, *map(_largest, (found - expected, shortfall)))
    return largest


@contextmanager
def _opened(engine: type[Engine], opened: OpenedModel) -> Iterator[Engine]:
    """Load a small model, whose requests share every beginning."""
    token = _is_proving.set(True)
    try:
        with silenced(), engine(opened, Pipeline()) as small:
            small.share_every_beginning()
            yield small
    finally:
        _is_proving.reset(token)


def _largest(differences: Tensor) -> float:
    """Return the largest one's size; infinite where a value is not finite, so that it equals
    nothing.
    """
    return float(differences.abs().nan_to_num(nan=math.inf, posinf=math.inf).max())


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
