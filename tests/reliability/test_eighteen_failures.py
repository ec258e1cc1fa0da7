"""The failures of docs/explanation/reliability.md that no other module provokes, by their number
there.

Each guard is followed by its inverse: the same input where the guard is off, or in the software
that has the failure.
"""

from __future__ import annotations

import ast
import math
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helm.common.cache_backend_config import SqliteCacheBackendConfig
from helm.common.key_value_store import SqliteKeyValueStore
from helm.common.local_context import LocalContext
from helm.common.request import Request, RequestResult

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm import Engine, GenerationRequest, response_cache
from flexgen_helm.engine import executor, passes
from flexgen_helm.errors import DiskFullError, NumericalError
from flexgen_helm.offload.disk import DirectFile
from flexgen_helm.offload.offload_directory import OffloadDirectory
from flexgen_helm.offload.pages import pages
from flexgen_helm.plugin.context import PluginContext, set_context
from flexgen_helm.plugin.convert import to_generation_request
from flexgen_helm.request import Completion, Cost, GenerationResult
from flexgen_helm.response_cache import ResponseCache, ResponseCacheError, response_cache_path
from flexgen_helm.service.models import PromptEncoder
from flexgen_helm.shared_sizes import ALIGNMENT
from tests.helpers.fake_engine import MAX_POSITIONS, FakeTokenizer
from tests.helpers.hostile import Violation, contained
from tests.helpers.offload import offloaded, workload
from tests.helpers.parity import TOLERANCE, prompts
from tests.helpers.paths import ROOT
from tests.helpers.small_disks import small_disk
from tests.helpers.tiny_models import TinyModel, llama_config, save_random, save_tokenizer

MIB = 1 << 20
Tiny = Callable[[str], TinyModel]


def scores(model: Path, prompt: list[int], **changes: Any) -> GenerationResult:
    request = GenerationRequest(
        prompt_token_ids=prompt, **{"max_tokens": 0, "echo_logprobs": True, **changes}
    )
    with Engine.from_pretrained(model) as engine:
        (result,) = engine.run([request])
    return result


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of log-probabilities of a prompt; the first token has none."""
    pairs = zip(ours[1:], theirs[1:], strict=True)
    return max(abs(a - b) for a, b in pairs)


# 2: the disk is full


def test_2_a_file_is_refused_whole_where_the_disk_is_full(tmp_path):
    with small_disk(tmp_path / "small", 64 << 10) as disk:
        with pytest.raises(DiskFullError, match="free"):
            DirectFile(disk / "weights", MIB, create=True)
        assert list(disk.iterdir()) == []


def test_2_a_mapped_file_dies_by_a_signal_there(tmp_path):
    """The inverse: a file whose blocks are not allocated is created, and a write through a map is
    SIGBUS.
    """
    code = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'w+b')\n"
        f"file.truncate({MIB})\n"
        f"mapped = mmap.mmap(file.fileno(), {MIB})\n"
        f"mapped[:] = bytes([1]) * {MIB}\n"
    )
    with small_disk(tmp_path / "small", 64 << 10) as disk:
        assert (
            subprocess.run([sys.executable, "-c", code, str(disk / "f")]).returncode
            == -signal.SIGBUS
        )


# 5 and 7: pickles in weights and caches

PICKLING = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "sqlitedict",
            "diskcache"}  # fmt: skip
EXECUTING = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load", "os.system",
             "dist.broadcast_object_list", "dist.all_gather_object"}  # fmt: skip
# Each with its reason, which SECURITY.md tells.
# between processes of one torchrun
TRUSTED = {"pipeline.py": {"dist.broadcast_object_list", "dist.all_gather_object"}}


def executing(source: str) -> set[str]:
    """What a module uses that can execute its input."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & PICKLING
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & PICKLING
        elif isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & EXECUTING
            found |= {f"{word.arg}=True" for word in node.keywords if word.arg in ("trust_remote_code", "shell")
                      and ast.unparse(word.value) != "False"}  # fmt: skip
    return found


def test_5_no_module_uses_what_executes_its_input():
    """`torch.load` has one place, which a test of conversions names."""
    sources = [
        path
        for folder in ("flexgen_helm", "scenarios", "runs")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 100
    assert {
        path.name: found for path in sources if (found := executing(path.read_text()))
    } == TRUSTED


def test_5_what_executes_its_input_is_found():
    source = (
        "import dill\nfrom pickle import loads\neval('1')\nyaml.load(x)\n"
        "f(trust_remote_code=given)\ng(shell=False)"
    )
    assert executing(source) == {"dill", "pickle", "eval", "yaml.load", "trust_remote_code=True"}


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_7_a_planted_row_runs_in_helms_cache_and_not_in_ours(tmp_path):
    planted = pickle.dumps(Bomb(tmp_path / "ran"))
    ours, theirs = tmp_path / "ours.sqlite", tmp_path / "theirs.sqlite"
    with closing(ResponseCache(ours)):
        pass
    with sqlite3.connect(ours) as connection:
        connection.execute("INSERT INTO answers VALUES ('key', ?)", [planted])
    with closing(ResponseCache(ours)) as cache:
        assert cache.get_many(["key"]) == {}
    assert not (tmp_path / "ran").exists()
    with SqliteKeyValueStore(str(theirs)) as store:
        store.put({"key": 1}, {})
    with sqlite3.connect(theirs) as connection:
        assert connection.execute("UPDATE unnamed SET value = ?", [planted]).rowcount == 1
    # What comes of the pickle is no dictionary.
    with SqliteKeyValueStore(str(theirs)) as store, suppress(AssertionError):
        store.get({"key": 1})
    assert (tmp_path / "ran").exists()


# 8: values that are not finite


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """A model whose weights are finite, and whose hidden states are not after layer 1."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("overflowing")
    save_random(folder, llama_config(), seed=2)
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for matrix in ("up_proj", "down_proj"):
        tensors[f"model.layers.1.mlp.{matrix}.weight"] *= 1e30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_8_a_value_that_overflows_fails_its_request_and_names_the_layer(overflowing):
    result = scores(overflowing, prompts(1, 30)[0])
    assert isinstance(result.error, NumericalError) and "layers.1" in str(result.error)
    assert result.completions == ()


def test_8_without_the_checks_it_is_an_answer(overflowing, monkeypatch):
    """The inverse. HELM leaves such a score out of its mean."""
    honest = passes.BatchState.check_finite
    monkeypatch.setattr(
        passes.BatchState, "check_finite", lambda self: torch.full_like(honest(self), -1)
    )
    monkeypatch.setattr(executor.math, "isfinite", lambda value: True)
    result = scores(overflowing, prompts(1, 30)[0])
    assert result.error is None and result.prompt_logprobs is not None
    assert any(math.isnan(score) for score in result.prompt_logprobs[1:] if score is not None)


# 9: padding and masks


@pytest.fixture(scope="module")
def opt(tiny):
    """Of this family `transformers` names token 1 as padding, and token 0 begins and ends texts."""
    return tiny("opt")


PADDED = [1, 5, 9, 1, 1, 33, 0, 120, 1]


def test_9_a_prompt_that_has_the_padding_token_is_a_prompt_as_any_other(opt):
    requests = [
        GenerationRequest(prompt_token_ids=ids, max_tokens=4, echo_logprobs=True, ignore_eos=True)
        for ids in (PADDED, *prompts(5, 40))
    ]
    with Engine.from_pretrained(opt.path) as engine:
        result = engine.run(requests)[0]
    assert result.prompt_logprobs is not None
    reference = opt.logprobs(PADDED)
    expected = [None, *(reference[row, token].item() for row, token in enumerate(PADDED[1:]))]
    assert difference(result.prompt_logprobs, expected) < TOLERANCE


def test_9_masked_by_its_id_it_has_other_scores(opt):
    """The inverse, as FlexLLMGen does it."""
    ids = torch.tensor([PADDED])
    with torch.no_grad():
        masked = torch.log_softmax(
            opt.reference(ids, attention_mask=(ids != 1).long()).logits[0], -1
        )
    expected = opt.logprobs(PADDED)
    moved = [
        abs(masked[row, token] - expected[row, token]).item()
        for row, token in enumerate(PADDED[1:])
    ]
    assert max(moved) > 100 * TOLERANCE


# 10: the token that begins texts


def test_10_a_second_bos_would_move_every_score(tiny):
    """HELM's prompts of language modelling begin with BOS as text; others have none. Both are
    conditioned on one.
    """
    model, encoder = tiny("gpt2"), PromptEncoder(FakeTokenizer(adds_bos=True))  # type: ignore[arg-type]
    plain = Request(
        model="flexgen/x", model_deployment="flexgen/x", prompt="ab", max_tokens=0, echo_prompt=True
    )
    fed = [
        to_generation_request(
            replace(plain, prompt=text), encoder, MAX_POSITIONS
        ).request.prompt_token_ids
        for text in ("ab", FakeTokenizer.bos_text + "ab")
    ]
    once = [FakeTokenizer.bos_id, ord("a"), ord("b")]
    assert [list(ids or ()) for ids in fed] == [once, once]
    expected, twice = model.logprobs(once), model.logprobs([once[0], *once])
    found = scores(model.path, once).prompt_logprobs
    assert found is not None
    for row, token in enumerate(once[1:]):
        assert abs((found[row + 1] or 0.0) - expected[row, token].item()) < TOLERANCE
        assert abs(twice[row + 1, token] - expected[row, token]).item() > 100 * TOLERANCE


# 11: log-probabilities


def test_11_log_probabilities_of_greedy_tokens_are_those_of_the_model(tiny):
    """The inverse too: after the division by HELM's temperature for 'greedy', all are 0."""
    model, prompt = tiny("llama"), [5, 9, 33, 120]
    (completion,) = scores(
        model.path, prompt, max_tokens=6, echo_logprobs=False, ignore_eos=True
    ).completions
    rows = model.logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    picked = torch.tensor(completion.token_ids)[:, None]
    expected = rows.gather(1, picked)[:, 0]
    assert (
        torch.allclose(torch.tensor(completion.logprobs), expected, atol=TOLERANCE)
        and expected.max() < -0.5
    )
    tempered = torch.log_softmax(rows / 1e-7, -1).gather(1, picked)[:, 0]
    assert tempered.abs().max() == 0.0


# 13: SQLite among threads and processes

STORED = GenerationResult(
    (Completion("a", ("a",), (1,), (-0.5,), "stop"),), (3, 4), (None, -1.25), None, Cost(2)
)


@pytest.mark.parametrize("patient", [True, False])
def test_13_a_locked_cache_is_waited_for(tmp_path, patient, monkeypatch):
    """The inverse: without patience the lock is an error."""
    with closing(ResponseCache(tmp_path / "j.sqlite")):
        pass
    if not patient:
        monkeypatch.setattr(response_cache, "BUSY_TIMEOUT_S", 0.0)
    holder = sqlite3.connect(tmp_path / "j.sqlite", isolation_level=None, check_same_thread=False)
    with closing(ResponseCache(tmp_path / "j.sqlite")) as cache, closing(holder):
        holder.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.3, holder.rollback)
        timer.start()
        if patient:
            cache.put_many({"key": STORED})
            assert cache.get_many(["key"]) == {"key": STORED}
        else:
            with pytest.raises(ResponseCacheError, match="locked"):
                cache.put_many({"key": STORED})
        timer.join()


def test_13_no_write_ahead_log_which_network_disks_break(tmp_path):
    with closing(ResponseCache(tmp_path / "j.sqlite")) as cache:
        cache.put_many({"key": STORED})
        assert {path.name for path in tmp_path.iterdir()} == {"j.sqlite"}
        with sqlite3.connect(tmp_path / "j.sqlite") as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


# 14: processes that stay behind


def test_14_an_engine_starts_no_process(tiny, tmp_path):
    model = tiny("llama")
    with contained(tmp_path, model.path), offloaded(tiny, "llama", tmp_path, "auto") as engine:
        results = engine.run(workload(count=3))
    assert all(result.error is None for result in results)


def test_14_a_process_that_it_started_would_be_noticed(tmp_path):
    with pytest.raises(Violation, match="Popen"), contained(tmp_path):
        subprocess.run([sys.executable, "-c", ""])


# A parent that starts a child, says its pid, and waits.
PARENT = (
    "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid, "
    "flush=True); input()"
)
CHILD = "import time; {guard}; open({file!r}, 'w').close(); time.sleep(60)"
GUARD = "from flexgen_helm.cli.pipeline_rank import end_with_parent; end_with_parent()"


@pytest.mark.parametrize("guarded", [True, False])
def test_14_a_rank_ends_with_torchrun(tmp_path, guarded):
    """The inverse: a child of a process that is killed lives on."""
    ready = tmp_path / "ready"
    child = CHILD.format(guard=GUARD if guarded else "pass", file=str(ready))
    command = [sys.executable, "-c", PARENT, child]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        while not ready.exists():
            time.sleep(0.01)
        parent.kill()
    _, alive = psutil.wait_procs([rank], timeout=5 if guarded else 0.3)
    for process in alive:
        process.kill()
    assert bool(alive) != guarded


# 15: another model's weights or answers


def matrix(value: int) -> torch.Tensor:
    return torch.full((8, ALIGNMENT // 16), value, dtype=torch.float16)


def weights_on_disk(folder: Path, fingerprints: str) -> list[int]:
    """Write models A, B, A with these fingerprints, and return what each of them then reads."""
    where, read = OffloadDirectory(folder), []
    for value, fingerprint in zip((1, 2, 1), fingerprints, strict=True):
        file = where.weights(fingerprint * 64, "float16").ensure(
            "a.weight", matrix(value).nbytes, [matrix(value)]
        )
        read.append(int(file.read_tensor(0, (1,), torch.float16)))
        file.close()
    where.close()
    return read


def test_15_files_of_weights_are_those_of_the_fingerprint(tmp_path):
    """The inverse: files that are found by the name of the matrix alone."""
    assert weights_on_disk(tmp_path / "ours", "aba") == [1, 2, 1]
    assert weights_on_disk(tmp_path / "by name", "aaa") == [1, 1, 1]


def test_15_models_of_one_name_do_not_share_answers(tmp_path, monkeypatch):
    """Their files have the same sizes and names, and HELM sees the same request."""
    for seed in (1, 2):
        save_random(tmp_path / str(seed) / "model", llama_config(), seed)
        save_tokenizer(tmp_path / str(seed) / "model")
    name = "flexgen/mine"
    monkeypatch.setenv("FLEXGEN_HELM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    asked = Request(
        model=name, model_deployment=name, prompt="the quick", temperature=0.0, max_tokens=8
    )

    def results() -> list[RequestResult]:
        answers = []
        for seed in (1, 2, 1):
            (tmp_path / "models.yaml").write_text(f"mine: {tmp_path / str(seed) / 'model'}\n")
            previous = set_context(PluginContext())
            try:
                helm = LocalContext(
                    str(tmp_path / "prod_env"), SqliteCacheBackendConfig(str(tmp_path))
                )
                answers.append(helm.make_request(asked))
            finally:
                set_context(previous).service.close()
        assert all(answer.success for answer in answers)
        return answers

    first, second, third = results()
    assert [first.cached, second.cached, third.cached] == [False, False, True]
    assert first.completions == third.completions != second.completions
    # The inverse: one file for all models of a name.
    one = response_cache_path(tmp_path / "home", "mine")
    monkeypatch.setattr("flexgen_helm.service.service.response_cache_path", lambda *_: one)
    first, second, third = results()
    assert [first.cached, second.cached, third.cached] == [False, True, True]
    assert first.completions == second.completions


# 16: two runs in one folder


def test_16_runs_of_one_folder_have_files_of_their_own(tmp_path):
    """The inverse: one path for all, as FlexLLMGen has it."""
    runs = [OffloadDirectory(tmp_path / "offload") for _ in range(2)]
    assert read_back([run.scratch("cache-1", ALIGNMENT) for run in runs]) == [1, 2]
    for run in runs:
        run.close()
    assert not list((tmp_path / "offload").glob("run-*"))
    fixed = DirectFile(tmp_path / "t_0", ALIGNMENT, create=True)
    assert read_back([fixed, DirectFile(tmp_path / "t_0", ALIGNMENT, create=False)]) == [2, 2]


def read_back(files: list[DirectFile]) -> list[int]:
    """Write a number of its own into each file, then read all of them."""
    for number, file in enumerate(files, start=1):
        file.write(0, pages(ALIGNMENT).fill_(number))
    read = []
    for file in files:
        buffer = pages(ALIGNMENT)
        file.read(0, buffer)
        read.append(int(buffer[0]))
        file.close()
    return read
