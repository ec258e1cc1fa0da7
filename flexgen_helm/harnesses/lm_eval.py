"""A model of lm-evaluation-harness on the engine.

    loglikelihood          (context, continuation) -> ids -> a request that scores
                           -> (log-probability, is greedy)
    loglikelihood_rolling  text -> windows of ids -> requests that score -> their sum
    generate_until         (context, settings) -> ids -> a request that draws
                           -> text before the first stop string

All requests of a call are one block of the service, so their answers go to the response cache.
Encoding is the harness's: `TemplateLM` joins context and continuation, `lm_eval.utils` cuts a text
into windows.

The harness's main branch finds the class by the entry point `flexgen` of the group
`lm_eval.models`; a release without that needs `register()`.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
)

from flexgen_helm.config import FLAGS, OPTIONS, EngineOptions, options_of_flags
from flexgen_helm.engine.scoring import EncodedPair, Score, read_score, scoring_request
from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.files import question
from flexgen_helm.request import Completion, GenerationRequest, GenerationResult
from flexgen_helm.service import process
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import (
    ModelReader,
    model_arguments,
    read_generation,
)
from flexgen_helm.service.service import KeyedRequest, Service, request_key
from flexgen_helm.tokenizer.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
MAX_GEN_TOKS = 256  # the harness's default
# Arguments of other backends that change nothing at these values; a checkpoint's own code is never
# run.
_NEUTRAL_ARGUMENTS: Mapping[str, Any] = {
    "trust_remote_code": (False, True),
    "dtype": ("auto", "float16"),
    "parallelize": (False,),
}
# Options that the harness sets: name -> its flag.
_FLAGS_OF_HARNESS = {
    "apply_chat_template": "--apply_chat_template",
    "chat_template": "--apply_chat_template",
    "system_prompt": "--system_instruction",
}
# Settings of generation that requests have.
_SAMPLING = {"do_sample", "temperature", "top_p", "until", "max_gen_toks"}
# Settings of generation that change nothing at these values.
_NEUTRAL_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "top_k": (0, -1), "min_p": (0,), "num_beams": (1,), "repetition_penalty": (1,),
    "num_return_sequences": (1,), "skip_special_tokens": (True,), "use_cache": (True,),
}  # fmt: skip
# Settings that greedy answers ignore.
_SAMPLING_ONLY = {"temperature", "top_p", "top_k", "min_p"}
_END_OF_TURN = "<the turn goes on from here> "  # no template changes it


class _Generation(NamedTuple):
    """A request for an answer.

    stops: texts that end the answer. excess: tokens of the context that are cut off, if more than
        0.
    """

    request: GenerationRequest
    stops: list[str]
    excess: int


class _ThinkEnd(NamedTuple):
    """What ends thinking.

    id: None if it is several tokens.
    text: None if it was given as an id.
    engine_knows_it: it is the chat template's. For a different end the engine draws without stop
        strings, which are applied afterwards, behind the end.
    """

    id: int | None
    text: str | None
    engine_knows_it: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, marker: str | int, template_end: str | None) -> _ThinkEnd:
        """Return what a text or the id of a token stands for; template_end: what ends thinking in
        the chat template.
        """
        if isinstance(marker, int):
            return cls(marker, None, tokenizer.decode([marker]) == template_end)
        ids = tokenizer.encode(marker, add_special_tokens=False)
        return cls(ids[0] if len(ids) == 1 else None, marker, marker == template_end)


def register_model() -> None:
    """Make `flexgen` a model of the harness in this process, unless its entry point has."""
    if "flexgen" not in model_registry:
        model_registry.register("flexgen", target=FlexgenLM)


class FlexgenLM(TemplateLM):
    """A model of the engine for `simple_evaluate`, or `--model flexgen`.

    pretrained: catalog name, hub repository, folder or `.gguf` file; a suffix such as `-4bit` names
        the precision.
    max_length: tokens of a context and what follows it; the model's window where it is left out.
    max_gen_toks: most tokens of an answer where a task says nothing.
    prefix_token_id: begins a text without context; BOS, or EOS where there is no BOS, where it is
        left out.
    add_bos_token: put BOS before every text, or never; as the tokenizer does where it is left out.
    think_end_token: text or id of the token that ends thinking. What precedes it is no part of the
        answer, and stop strings count behind it only.
    enable_thinking, chat_template_args: variables of the chat template.
    batch_size, max_batch_size: ignored; the engine plans its own batches.
    arguments: engine options by the names of their flags, such as `cpu_memory='8GiB'`, or as
        `EngineConfig` has them.

    Raises `UsageError` for what is not known or cannot be. A context manager; `close` frees the
    model.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        revision: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        _service: Service | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        variables = dict(chat_template_args or {})
        variables |= {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        options = engine_options({**arguments, **({} if device is None else {"device": device})})
        if pretrained is None:
            raise UsageError("no model is named; give --model_args pretrained=MODEL")
        if variables:
            options = {**options, "chat_template_kwargs": variables}
        # The harness says which prompts are chats.
        self._model = model_arguments(
            str(pretrained), {**options, "apply_chat_template": False}, revision
        )
        reader = ModelReader("lm-evaluation-harness")
        window = reader.facts(self._model).max_positions
        if max_length is not None and not 1 < max_length <= window:
            raise UsageError(
                f"max_length is {max_length}; it must be more than 1 and at most the window, "
                f"{window}"
            )
        self.max_length, self.max_gen_toks = max_length or window, max_gen_toks
        self.tokenizer: Tokenizer = reader.encoder(self._model).tokenizer  # type: ignore[assignment]
        self._chat = reader.chat(self._model)
        self._generation_settings = read_generation(self._model)
        self._prefix, self._add_bos = prefix_token_id, add_bos_token
        self._think_end = None
        if think_end_token is not None:
            format_ = self._chat.thinking_format
            self._think_end = _ThinkEnd.of(
                self.tokenizer, think_end_token, format_.marks.end if format_ else None
            )
        self._scored: Sequence[Instance] = ()  # those of the call; errors name their documents
        if self._think_end is None and self._model.config.thinking_budget is not None:
            raise UsageError(
                "thinking_budget needs think_end_token, which says where thinking ends"
            )
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            _log.info("batch sizes are ignored: the engine plans its own batches")
        self._service = _service or Service(EngineLoader())
        if _service is None:
            atexit.register(process.close_at_exit, self._service.close)
            process.interrupt_on_signals(self._service.interrupt)
            self._service.preload(self._model)

    def close(self) -> None:
        """Free the model. Answers are stored by then."""
        self._service.close()

    def use_service(self, service: Service) -> None:
        """Compute with another service from now on."""
        self._service = service

    def __enter__(self) -> FlexgenLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # What the harness asks of a model

    @property
    def eot_token_id(self) -> int:
        ends = self.tokenizer.eos_ids
        texts = {self.tokenizer.decode([eos_id]): eos_id for eos_id in sorted(ends)}
        token = texts.get(self.tokenizer.eos_text or "", min(ends, default=None))
        if token is None:
            raise UsageError(
                f"the tokenizer of {self._model.name} names no end of a text; give prefix_token_id"
            )
        return token

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is not None:
            return self._prefix
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of prompts tells models apart by."""
        return self._model.path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what the results of an evaluation say of the model."""
        import torch

        record = self._service.record(self._model, self._chat)
        known = {
            "precision": self._model.config.precision,
            "fingerprint": record.get("fingerprint"),
        }
        return {**known, "flexgen_run": {**record, "seed": torch.initial_seed()}}

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the checkpoint's template. Raises `UsageError` where it has none, and for the name
        of another one.
        """
        if not chat_template:
            return None
        if self.tokenizer.chat_template is None:
            raise UsageError(
                f"the tokenizer of {self._model.name} has no chat template; leave "
                "--apply_chat_template out"
            )
        if chat_template not in (True, "default"):
            raise UsageError(
                f"chat template {chat_template!r} is not supported; only the checkpoint's default "
                "is"
            )
        return self.tokenizer.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat; without generation prompt it ends inside the last message, to
        be continued.
        """
        variables, history = self._chat.options.chat_template_kwargs, chat_history
        if not add_generation_prompt:
            last = {**chat_history[-1], "content": chat_history[-1]["content"] + _END_OF_TURN}
            history = [*chat_history[:-1], last]
        try:
            text = self.tokenizer.apply_chat_template(history, add_generation_prompt, **variables)
        except RequestError:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            _log.warning("the chat template refuses a system message, which is left out")
            return self.apply_chat_template(without, add_generation_prompt)
        if add_generation_prompt:
            return text
        position = text.rfind(_END_OF_TURN.strip())
        if position < 0:
            raise RequestError(
                "the chat template changes the last message, so it cannot be continued"
            )
        # A template that trims messages leaves no space behind the last one either.
        return (
            text[:position] if text.startswith(_END_OF_TURN, position) else text[:position].rstrip()
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return ids; by default with BOS if the tokenizer adds one and the text has none."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos
        ids = self.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
        bos = self.tokenizer.bos_id
        if add_special_tokens and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    # Answers

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        for request in requests:
            with _naming(request):
                if not request.args[1]:
                    raise RequestError("the continuation is empty, and has no score")
        self._scored = requests
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._scored = ()

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score (texts, context, continuation), the last two as ids; a long context loses its first
        tokens.
        """
        scores = self._score(
            [(context, continuation) for _, context, continuation in requests], self._scored
        )
        for (texts, _, _), score in zip(requests, scores):
            self.cache_hook.add_partial("loglikelihood", texts, tuple(score))
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [request.args[0] for request in requests]
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(text), self.prefix_token_id, self.max_length, 1
                )
            ]
            for text in texts
        ]
        scores = iter(self._score([window for text_windows in windows for window in text_windows]))
        sums = [math.fsum(next(scores).logprob for _ in text_windows) for text_windows in windows]
        for text, total in zip(texts, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def _score(
        self,
        pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
        instances: Sequence[Instance] = (),
    ) -> list[Score]:
        """Score pairs of context and continuation; instances: those that errors name."""
        encoded = [EncodedPair(context, continuation) for context, continuation in pairs]
        _warn_of_cut(
            len(pair.context) + len(pair.continuation) - self.max_length - 1 for pair in encoded
        )
        scoring = []
        for index, pair in enumerate(encoded):
            with _naming(instances[index]) if instances else nullcontext():
                scoring.append(scoring_request(pair, self.max_length, truncate=True))
        results = self._compute(scoring)
        return [
            read_score(result, len(pair.continuation)) for result, pair in zip(results, encoded)
        ]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        import torch

        seed = torch.initial_seed()  # the harness's --seed
        num_draws: Counter[str] = Counter()
        generations = []
        for request in requests:
            context, settings = request.args
            # A repeated request of a task draws anew, in every run the same.
            draw_name = json.dumps([seed, context, settings], sort_keys=True, default=str)
            num_draws[draw_name] += 1
            seed_text = f"{draw_name}/{num_draws[draw_name]}"
            with _naming(request):
                generations.append(self._generation(context, settings, seed_text))
        _warn_of_cut(generation.excess for generation in generations)
        results = self._compute([generation.request for generation in generations])
        answers = []
        for request, generation, result in zip(requests, generations, results):
            answers.append(self._answer_text(result.completions[0], generation.stops))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _generation(self, context: str, settings: Mapping[str, Any], seed_text: str) -> _Generation:
        """Return the request for an answer.

        seed_text: what random draws depend on.
        Raises `UsageError` for settings that are not supported.
        """
        normalized: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings), self.max_gen_toks))
        is_sampled = bool(normalized["do_sample"])
        from_file = self._generation_settings
        for name, value in normalized.items():
            if name in _SAMPLING or value is None or (name in _SAMPLING_ONLY and not is_sampled):
                continue
            if name in from_file.applied:
                if value != from_file.applied[name]:
                    raise UsageError(
                        f"{name}={value!r} of a task's generation_kwargs is not what "
                        f"{from_file.path} says, {from_file.applied[name]!r}; leave it out, or the "
                        "file's with --generation-config ignore"
                    )
            elif value not in _NEUTRAL_SETTINGS.get(name, ()):
                raise UsageError(
                    f"{name}={value!r} of a task's generation_kwargs is not supported; leave it out"
                )
        room = self.max_length - normalized["max_gen_toks"]
        if room < 1:
            raise UsageError(
                f"max_gen_toks is {normalized['max_gen_toks']}, and the model's window is "
                f"{self.max_length} tokens; give a smaller one with --gen_kwargs max_gen_toks=N"
            )
        ids = self.tok_encode(context)
        # The text of EOS ends an answer for the harness.
        stops = [
            stop
            for stop in handle_stop_sequences(normalized["until"], eos=self.tokenizer.eos_text)
            if stop
        ]
        think_end = self._think_end
        thinking = (
            self._chat.thinking(context)
            if think_end is not None and think_end.engine_knows_it
            else None
        )
        # Stop strings end drawing, unless only `_answer_text` knows where thinking ends.
        while_drawing = stops if think_end is None or thinking is not None else []
        request = GenerationRequest(
            prompt_token_ids=tuple(ids[-room:]),
            max_tokens=normalized["max_gen_toks"],
            temperature=float(normalized.get("temperature") or 0.0) if is_sampled else 0.0,
            top_p=float(normalized.get("top_p") or from_file.top_p) if is_sampled else 1.0,
            seed=int.from_bytes(hashlib.sha256(seed_text.encode()).digest()[:4], "big")
            if is_sampled
            else 0,
            stop=tuple(while_drawing),
            thinking=thinking,
        )
        return _Generation(request, stops, len(ids) - room)

    def _answer_text(self, completion: Completion, stops: list[str]) -> str:
        """Return the answer: behind thinking, before the first stop string."""
        ids, think_end = list(completion.token_ids), self._think_end
        marker = think_end and think_end.text
        if think_end is None or think_end.id not in ids:
            text = self.tokenizer.decode_plain(ids)
        else:  # by id: a special token has no text in an answer
            answer_ids = ids[len(ids) - ids[::-1].index(think_end.id) :]
            text, marker = self.tokenizer.decode_plain(answer_ids).lstrip(), None
        return str(postprocess_generated_text(text, stops, marker))

    def _compute(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Compute requests as one block. Raises the first error of a request, after all others are
        stored.
        """
        self._service.resume()  # after Ctrl-C a notebook may go on
        keyed = [KeyedRequest(request, request_key(request)) for request in requests]
        with self._service.submit(self._model, keyed):
            results = [self._service.respond(self._model, request).result for request in keyed]
        failed = [result.error for result in results if result.error is not None]
        if failed:
            raise RequestError(
                f"{len(failed)} of {len(results)} requests failed: {failed[0]}"
            ) from failed[0]
        return results


def engine_options(arguments: Mapping[str, Any]) -> EngineOptions:
    """Return the options of model arguments. Raises `UsageError` for one that is not known."""
    flags: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _FLAGS_OF_HARNESS:
            raise UsageError(
                f"{name} is no model argument here; use the harness's {_FLAGS_OF_HARNESS[name]}"
            )
        if name in FLAGS:
            flags[name] = value
        elif name in OPTIONS:
            options[name] = value
        elif value not in _NEUTRAL_ARGUMENTS.get(name, ()):
            known = sorted({*FLAGS, *OPTIONS} - set(_FLAGS_OF_HARNESS) - {"chat_template"})
            meant = question(name, known, f"the engine's are {', '.join(known)}").strip()
            raise UsageError(f"model argument {name}={value!r} is not supported; {meant}")
    return {**options, **options_of_flags(flags)}


@contextmanager
def _naming(request: Instance) -> Iterator[None]:
    """Name the task and the document of a request in an error that is raised meanwhile."""
    try:
        yield
    except (RequestError, UsageError) as error:
        kind = RequestError if isinstance(error, RequestError) else UsageError
        raise kind(f"document {request.doc_id} of {request.task_name}: {error}") from error


def _warn_of_cut(excesses: Iterable[int]) -> None:
    """Warn of contexts that lose their first tokens; excesses: by how many tokens each text is too
    long.
    """
    cut = [excess for excess in excesses if excess > 0]
    if cut:
        _log.warning(
            "%d contexts lose their first tokens, up to %d, to fit into the window",
            len(cut),
            max(cut),
        )
