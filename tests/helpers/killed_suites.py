"""Suites on a real engine in processes that end where they are told to.

As a script it imports HELM and torch once, and then runs each suite in a fork of itself, which
takes a second instead of ten:

    python killed_suites.py         reads one JSON object a line, an `Order`, and answers with one,
                                    an `Outcome`

The model is given as pickled weights, so that a run begins with a conversion.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from tests.helpers.fake_engine import limit_blocks
from tests.helpers.paths import ROOT

ENTRIES = ["simple_mcqa:model=flexgen/tiny", "simple_mcqa_scored:model=flexgen/tiny"]
DEADLINE_S = 90  # after which a process says where it is, and ends
MAX_PENDING = 3  # answers of a transaction: a suite of twenty has several
FOLDERS = "home,benchmark_output,prod_env,in,out"  # where calls are counted


@dataclass(frozen=True)
class Order:
    """What a process does.

    folder: its working folder, with home, log and results.
    model: the folder with pickled weights.
    command: of flexgen-helm; None for the suite. Of `lm-eval`, `plan` and `profile` what takes
        seconds is left out.
    at: the step at which it is ended, counted from 0; None for the end.
    name: of the steps that are counted; '' for all.
    after_s: seconds after which it is ended, whatever it does; None for never. Where reads are held
        to a rate they count from the first pass.
    number: the signal that ends it.
    limits: resource limits, RLIMIT_FSIZE and the like: [name, bytes] each.
    converts: whether the command `convert` comes first.
    options: further flags of the suite. blocks: after which `run --until` ends.
    unguarded: answers are stored when the model is closed, as if nothing were stored before.
    read_gb_s: of weights on the disk, where it is not as fast as the disk is.
    copies: what a copy of the folder has at that moment stays, as of a machine without power.
    deadline_s: seconds after which the process says where it is, and ends.
    pass_s, token_s: seconds that a pass takes longer, and for each of its tokens. keep_every_s: most seconds that a token is not kept.
    fault: call, number, errno, and whether all later ones fail too, as of `arm` in failing_calls.c;
        None leaves calls as they are. Those in FOLDERS are in the file `calls` if the process was
        given `library`.
    """

    folder: str
    model: str
    command: list[str] | None = None
    at: int | None = None
    name: str = ""
    after_s: float | None = None
    number: int = signal.SIGKILL
    limits: list[tuple[str, int]] = field(default_factory=list)
    converts: bool = True
    options: list[str] = field(default_factory=list)
    batch_invariant: bool = True
    blocks: int | None = None
    unguarded: bool = False
    fault: tuple[str, int, int, bool] | None = None
    pass_s: float = 0.0
    token_s: float = 0.0
    read_gb_s: float = 0.0
    keep_every_s: float = 10.0
    copies: bool = False
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True)
class Outcome:
    """How a process ended: its exit code or minus its signal, the seconds since its signal, and its
    steps by name.

    passes: when each began and ended, and its tokens. promised: seconds that a stop costs, as the
        panel has it.
    computed, drawn: keys of answers, and of their tokens with the completion, the step and the
        time.
    """

    code: int
    seconds_after_signal: float
    steps: list[str]
    computed: list[str]
    output: str
    drawn: list[str] = field(default_factory=list)
    signalled: float = 0.0
    passes: list[list[float]] = field(default_factory=list)
    promised: float = 0.0


def pickled_model(folder: Path) -> Path:
    """Save a model that must be converted; HELM's prompts have hundreds of tokens in its
    tokenizer.
    """
    import torch
    from safetensors.torch import load_file

    from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

    save_random(folder, llama_config(max_position_embeddings=2000), seed=1)
    save_tokenizer(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


class Suites:
    """The forking process, and orders to it. A context manager. library: of failing_calls.c,
    compiled.
    """

    def __init__(
        self, folder: Path, model: Path, library: Path | None = None, *packages: str
    ) -> None:
        """packages: are imported before the first order."""
        self.folder, self.model = folder, model
        variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FLEXGEN_HELM_HARDWARE": "laptop",
                     "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        variables |= {"LD_PRELOAD": str(library)} if library else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.killed_suites", *packages], env={**os.environ, **variables},
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(folder / "server").open("w"), cwd=ROOT,
        )  # fmt: skip

    def run(self, folder: str, **order: Any) -> Outcome:
        (self.folder / folder).mkdir(exist_ok=True)
        assert self._process.stdin and self._process.stdout
        whole = Order(**{"folder": str(self.folder / folder), "model": str(self.model), **order})
        print(json.dumps(asdict(whole)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, (self.folder / "server").read_text()
        return Outcome(**json.loads(answer))

    def results(self, folder: str) -> dict[str, Any]:
        """Answers and statistics of all runs without times."""
        from tests.helpers.helm_runs import Place

        return Place(self.folder / folder).results()

    def __enter__(self) -> Suites:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()


# ---- in the forking process ----


def _serve() -> None:
    import helm.benchmark.metrics.basic_metrics
    import helm.benchmark.metrics.evaluate_reference_metrics  # noqa: F401
    import torch
    import transformers  # noqa: F401
    import yaml
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    torch.set_num_threads(1)
    yaml.SafeLoader = yaml.CSafeLoader  # saves each fork a second
    for name in sys.argv[1:]:
        importlib.import_module(name)
    # saves each half a second: its collections would copy the pages of all that is imported
    gc.freeze()
    for line in sys.stdin:
        order = Order(**json.loads(line))
        print(json.dumps(asdict(_run(order))), flush=True)


def _run(order: Order) -> Outcome:
    folder = Path(order.folder)
    for name in (
        "steps",
        "computed",
        "drawn",
        "output",
        "signalled",
        "calls",
        "passes",
        "promised",
    ):
        (folder / name).unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _be_suite(order, folder)
    if order.after_s is not None:
        while order.read_gb_s and not (folder / "promised").exists():
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                break
            time.sleep(0.05)
        time.sleep(order.after_s)
        (folder / "signalled").write_text(repr(time.time()))
        if order.copies:
            _replace_by_copy(folder, child)
        os.kill(child, order.number)
    _, status = os.waitpid(child, 0)
    ended = time.time()

    def read(name: str) -> str:
        return (folder / name).read_text() if (folder / name).exists() else ""

    since = ended - float(read("signalled") or ended)
    code = os.waitstatus_to_exitcode(status)
    passes = [[*map(float, line.split())] for line in read("passes").splitlines()]
    return Outcome(
        code, since, read("steps").split(), read("computed").split(), read("output"),
        read("drawn").splitlines(), float(read("signalled") or ended), passes,
        float(read("promised") or 0),
    )  # fmt: skip


def _replace_by_copy(folder: Path, child: int) -> None:
    os.kill(child, signal.SIGSTOP)
    for part in [part for part in folder.iterdir() if part.is_dir()]:
        copy = shutil.copytree(part, folder / "copy")
        shutil.rmtree(part)
        copy.rename(part)


def _be_suite(order: Order, folder: Path) -> None:
    """Be the suite, and end: never returns."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    code = 1
    try:
        os.chdir(folder)
        tempfile._RandomNameSequence.characters = "0123456789"  # no part of a call's name
        (folder / "models.yaml").write_text(
            json.dumps(dict.fromkeys(("tiny", WHEEL_MODEL), order.model))
        )
        os.environ.update(
            FLEXGEN_HELM_HOME=str(folder / "home"), FLEXGEN_HELM_MODELS=str(folder / "models.yaml")
        )
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _install_steps(order, folder)
        _shorten((order.command or ["run"])[0])
        faulthandler.dump_traceback_later(order.deadline_s, exit=True)
        if "failing_calls" in os.environ.get("LD_PRELOAD", ""):
            call, *fault = order.fault or ("", 0, 0, False)
            texts = [str(folder), FOLDERS, str(folder / "calls"), call]
            ctypes.CDLL(None).arm(
                *(text.encode() for text in texts), *map(ctypes.c_long, fault[:1]), *fault[1:]
            )
        _set_limits(order)
        if order.blocks is not None:
            limit_blocks(order.blocks)
        from flexgen_helm import cli

        sys.argv = ["flexgen-helm", *(order.command or ["run"])]
        code = cli.main(["convert", order.model]) if order.converts else 0
        if order.command is not None:
            code = cli.main(order.command)
        elif code == 0:
            arguments = ["-r", *ENTRIES, "-m", "5", "--suite", "s", "-n", "4", *order.options]
            arguments += ["--batch-invariant"] * order.batch_invariant
            code = cli.main(["run", *arguments])
    except BaseException as error:
        import traceback

        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        import atexit

        atexit._run_exitfuncs()
        os._exit(code)


def _shorten(command: str) -> None:
    if command == "lm-eval":
        from tests.helpers.lm_eval_tasks import leave_out_others

        leave_out_others(pytest.MonkeyPatch())
    elif command in ("profile", "plan"):
        from flexgen_helm.engine import profiler
        from flexgen_helm.hardware.profile import load_profile

        profiler._measure_processor = lambda *_: load_profile("laptop").cpu  # type: ignore[assignment]
        profiler._FILE_BYTES, profiler._CHUNK_BYTES = 8 << 20, 1 << 20


def _set_limits(order: Order) -> None:
    import resource

    for name, value in order.limits:
        number = getattr(resource, name)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))


def _install_steps(order: Order, folder: Path) -> None:
    """Count what a suite does, write it down, and end the process at the step that is asked for."""

    from flexgen_helm import files, progress, response_cache
    from flexgen_helm.checkpoint import convert, fingerprint
    from flexgen_helm.engine import executor
    from flexgen_helm.offload.disk import DirectFile
    from flexgen_helm.offload.rate_limit import RateLimit
    from flexgen_helm.progress import Progress

    count = 0
    steps, computed, drawn, passes = (
        (folder / name).open("a", buffering=1) for name in ("steps", "computed", "drawn", "passes")
    )

    def step(name: str) -> None:
        nonlocal count
        print(name, file=steps)
        if order.name not in ("", name):
            return
        if count == order.at:
            (folder / "signalled").write_text(repr(time.time()))
            os.kill(os.getpid(), order.number)
        count += 1

    def counted(owner: Any, attribute: str, name: str, ends_too: bool = False) -> None:
        honest = getattr(owner, attribute)

        @wraps(honest)  # the plugin compares HELM's functions by their parameters
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            step(name)
            result = honest(*args, **kwargs)
            if ends_too:
                step(f"{name}-done")
            return result

        setattr(owner, attribute, wrapper)

    counted(fingerprint.SourceFile, "read", "load")
    counted(convert, "_write_shard", "convert", ends_too=True)
    counted(convert, "write_synced", "convert-write")
    counted(convert, "_put_in_place", "convert-rename", ends_too=True)
    counted(executor.Executor, "_compute", "compute")
    counted(response_cache.ResponseCache, "put_many", "cache", ends_too=True)
    counted(files, "write_synced", "write")
    counted(os, "replace", "rename")

    response_cache.MAX_PENDING_RESULTS = 10**9 if order.unguarded else MAX_PENDING
    if order.unguarded:
        response_cache.MAX_PENDING_S = 1e9
    add: Callable[..., None] = response_cache.ResponseWriter.add

    def noted(self: Any, key: str, result: Any) -> None:
        print(key, file=computed)
        add(self, key, result)

    response_cache.ResponseWriter.add = noted  # type: ignore[method-assign]
    draw: Callable[..., float | None] = response_cache.ResponseWriter.add_drawn

    def noted_token(self: Any, *token: Any) -> float | None:
        print(*token[:3], time.time(), file=drawn)
        step("draw")
        return draw(self, *token)

    response_cache.ResponseWriter.add_drawn = noted_token  # type: ignore[method-assign]
    response_cache.KEEP_EVERY_S = order.keep_every_s
    if order.read_gb_s:
        limit, transfer = RateLimit(order.read_gb_s), DirectFile._transfer

        def held(self: Any, is_write: bool, offset: int, buffer: Any) -> None:
            with limit.transfer(0 if is_write else buffer.nbytes):
                transfer(self, is_write, offset, buffer)

        DirectFile._transfer = held  # type: ignore[method-assign]
    run = executor.Executor.run

    def slow(self: Any, current: Any) -> None:
        began, num_tokens = time.time(), sum(batch.num_tokens for batch in current.batches)
        time.sleep(order.pass_s + order.token_s * num_tokens)
        run(self, current)
        if (folder / "promised").exists():  # not of the small model that is compared
            print(began, time.time(), num_tokens, file=passes)

    executor.Executor.run = slow  # type: ignore[method-assign]

    def note(event: progress.Event) -> None:
        if isinstance(event, Progress):
            (folder / "promised.new").write_text(repr(event.stop_s))
            (folder / "promised.new").rename(folder / "promised")

    progress._observers.append(note)


if __name__ == "__main__":
    _serve()
