"""A deterministic engine and tokenizer without torch or weights, for tests of everything that
touches HELM.

As a script it is `helm-run` (or `flexgen-helm run`, or `quickstart`) on that engine, in a process
of its own:

    python fake_engine.py run|suite|quickstart ARGUMENTS

Environment: FAKE_LOG names a file that gets one JSON line for every model loaded, block run and
    answer computed;
FAKE_DELAY_S is the time an answer takes; FAKE_TEMPLATE gives the tokenizer a chat template;
FAKE_BLOCKS is the number of blocks after which `run --until` ends.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexgen_helm.errors import Interrupted, NumericalError, RequestError
from flexgen_helm.request import Completion, Cost, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from flexgen_helm.plugin.context import PluginContext

MAX_POSITIONS = 4096
POISON = "\u2620"  # a prompt with this character yields NaN
VOCABULARY = " Even\nOddABCD"


class FakeTokenizer:
    """A token is a character, its id the code point."""

    bos_id, bos_text = 1, "\x01"
    eos_ids, eos_text = frozenset({2}), "\x02"
    chat_template: str | None = None

    def __init__(self, adds_bos: bool = False, chat_template: str | None = None) -> None:
        self.prefix, self.chat_template = (self.bos_id,) * adds_bos, chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _log("encode", text)
        ids = [ord(character) for character in text]
        return [*self.missing_prefix(ids), *ids] if add_special_tokens else ids

    def missing_prefix(self, ids: Sequence[int]) -> tuple[int, ...]:
        return () if tuple(ids[:1]) == self.prefix else self.prefix

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [chr(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **variables: Any) -> str:
        if self.chat_template is None:
            raise RequestError("the checkpoint has no chat template")
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return (
            turns
            + "".join(f"<{name}={value}>" for name, value in variables.items())
            + "<assistant>"
        )


def _draw(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), state)


def _logprob(state: int) -> float:
    return -(state % 997 + 1) / 200


def answer(request: GenerationRequest, batch_size: int = 1) -> GenerationResult:
    """What the engine says; a function of the request alone."""
    ids = tuple(request.prompt_token_ids or ())
    if len(ids) + request.max_tokens > MAX_POSITIONS + 1:
        return GenerationResult(
            error=RequestError(f"{len(ids)} tokens do not fit {MAX_POSITIONS} positions")
        )
    if ord(POISON) in ids:
        return GenerationResult(error=NumericalError("layer 3: not finite"))
    state, scores = 0, []
    for token in ids:
        scores.append(_logprob(state))
        state = _draw(state, token)
    completions = []
    for index in range(request.n):
        drawn, text, reason = _draw(state, request.seed % 2**32 + index), "", "length"
        logprobs = []
        for _ in range(request.max_tokens):
            drawn = _draw(drawn, 7)
            text += VOCABULARY[drawn % len(VOCABULARY)]
            logprobs.append(_logprob(drawn))
            ends = [text.index(stop) for stop in request.stop if stop in text]
            if ends:
                text, reason = text[: min(ends)], "stop"
                break
        tokens, logprobs = tuple(text), logprobs[: len(text)]
        completions.append(Completion(text, tokens, tuple(map(ord, text)), tuple(logprobs), reason))  # type: ignore
    cost = Cost(len(ids), float(len(ids)), sum(len(c.tokens) for c in completions), len(ids) + 1.5,
                float(sum(len(c.tokens) for c in completions)), 1e6, 0.002, 0.001, batch_size)  # fmt: skip
    prompt_logprobs = (None, *scores[1:])[: len(ids)] if request.echo_logprobs else None
    return GenerationResult(tuple(completions), ids, prompt_logprobs, None, cost)


_NOTHING = {"weights": 0, "cache": 0, "activations": 0}
# What a report of a suite shows of an engine, beside what each fake says.
USAGE: dict[str, Any] = {
    "bytes": dict.fromkeys(("disk_to_cpu", "cpu_to_disk", "cpu_to_gpu", "gpu_to_cpu"), _NOTHING),
    "time_s": {"compute": 12.0, "wait": 4.0, "other": 0.5},
    "peak_bytes": {"gpu": 0, "cpu": 2 << 30, "disk": 5 << 30},
    "limit_bytes": {"gpu": 0, "cpu": 4 << 30, "disk": 50 << 30},
    "peak_workspace_bytes": 1 << 28,
    "predicted_latency_s": 14.0,
    "roofline_s": 8.0,
}


class FakeEngine:
    """Records its requests in `runs`; computes them in reverse order, to show that order does not
    matter.

    usage: what its record has too.
    """

    usage: Mapping[str, Any] = {}

    def __init__(self, name: str = "fake", delay_s: float = 0.0) -> None:
        self.fingerprint = f"fake-{name}"
        self.runs: list[list[GenerationRequest]] = []
        self.last_run: dict[str, Any] = {}
        self.closed = False
        self.delay_s = float(os.environ.get("FAKE_DELAY_S", delay_s))
        _log("load", name)

    def run(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_result: Callable[[int, GenerationResult], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        progress: Callable[[Any], None] | None = None,
        on_drawn: Callable[..., None] | None = None,
    ) -> list[GenerationResult]:
        assert not self.closed
        self.runs.append(list(requests))
        _log("block", len(requests))
        results: list[GenerationResult] = [GenerationResult()] * len(requests)
        for index in reversed(range(len(requests))):
            if should_stop is not None and should_stop():
                raise Interrupted("stopped")
            time.sleep(self.delay_s)
            results[index] = answer(requests[index], len(requests))
            _log("answer", list(requests[index].prompt_token_ids or ()))
            if on_result is not None:
                on_result(index, results[index])
        self.last_run = {
            "policy": "fake",
            "schedule": "row",
            "bytes": {},
            "fingerprint": self.fingerprint,
        }
        self.last_run |= self.usage
        return results

    def close(self) -> None:
        self.closed = True
        _log("close", self.fingerprint)


def _log(event: str, value: Any) -> None:
    if path := os.environ.get("FAKE_LOG"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([event, value]) + "\n")


class FakeLoader:
    """An `EngineLoader` of fakes; keeps them in `engines`.

    make: makes an engine, where a test wants another than `FakeEngine`.
    """

    def __init__(
        self, make: Callable[[Any], FakeEngine] = lambda model: FakeEngine(model.name)
    ) -> None:
        self.engines: list[FakeEngine] = []
        self.make = make

    def import_modules(self, model: Any) -> None: ...

    def close(self) -> None: ...

    def fingerprint(self, model: Any) -> str | None:
        return f"fake-{model.name}"

    def load(self, model: Any) -> Any:
        self.engines.append(self.make(model))
        return self.engines[-1]


def fake_context(
    loader: FakeLoader | None = None, adds_bos: bool = False, chat_template: str | None = None
) -> PluginContext:
    """A context of the plugin whose engines and tokenizers are fakes."""
    from flexgen_helm.checkpoint.catalog import CATALOG
    from flexgen_helm.plugin.context import PluginContext
    from flexgen_helm.service.models import ModelFacts, ModelReader

    base = {name for name, entry in CATALOG.items() if not entry.instruct}
    return PluginContext(
        loader or FakeLoader(),  # type: ignore[arg-type]
        ModelReader(
            "HELM",
            load_tokenizer=lambda model: FakeTokenizer(adds_bos, chat_template),  # type: ignore[arg-type, return-value]
            read_facts=lambda model: ModelFacts(
                model.name, MAX_POSITIONS, 1, False, model.path in base
            ),
        ),
    )


def install(adds_bos: bool = False) -> None:
    """Make this process use fakes."""
    from flexgen_helm.plugin.context import set_context

    set_context(fake_context(adds_bos=adds_bos, chat_template=os.environ.get("FAKE_TEMPLATE")))


def limit_blocks(blocks: int) -> None:
    """Have `run --until` end after so many blocks of a fixed size, whatever its clock says."""
    from flexgen_helm.plugin import sample_blocks

    calls = 0

    def block(block_sizes: Sequence[int], measured: object, left_s: float) -> int | None:
        nonlocal calls
        calls += 1
        return None if calls > blocks else min(5, len(block_sizes) - 1)

    sample_blocks.largest_block = block


def main() -> int:
    import yaml

    # HELM reads 2 MB of its own YAML at each start, which takes two seconds in pure Python.
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
    install()
    if "FAKE_BLOCKS" in os.environ:
        limit_blocks(int(os.environ["FAKE_BLOCKS"]))
    kind, *arguments = sys.argv[1:]
    if kind == "quickstart":  # it writes a report
        FakeEngine.usage = USAGE
    if kind in ("suite", "quickstart"):
        from flexgen_helm.cli import main as flexgen_helm

        return flexgen_helm(["run" if kind == "suite" else kind, *arguments])
    from helm.benchmark.run import main as helm_run

    sys.argv = ["helm-run", *arguments]
    helm_run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
