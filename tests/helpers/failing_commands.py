"""Commands whose system calls fail: each answer to a call is right all the same, or ends with one
true sentence.

    python -m tests.helpers.failing_commands COUNT SEED [COMMAND...]    injects drawn errors

The calls of an undisturbed command on its home, its input and its output are listed; drawn ones
fail.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from errno import (
    EACCES,
    EDQUOT,
    EFBIG,
    EIO,
    EMFILE,
    ENOLCK,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    EROFS,
    errorcode,
)
from pathlib import Path
from typing import Any

from tests.helpers.killed_suites import Outcome, Suites, pickled_model
from tests.helpers.paths import ROOT

FULL = (ENOSPC, EDQUOT, EFBIG, EIO)
# What a call may answer; HELM, SQLite, safetensors and PyTorch make some of them.
ERRORS = {
    "open-r": (EMFILE, ENOMEM, EIO),
    "open-w": (EROFS, ENOSPC, EMFILE, EDQUOT, ENOMEM, EACCES),
    "fopen": (EMFILE, EIO),
    "opendir": (EMFILE, ENOMEM),
    "mkdir": (EROFS, ENOSPC, EDQUOT, ENOMEM),
    "rename": (EROFS, ENOSPC, EDQUOT, EIO),
    "symlink": (EROFS, ENOSPC, EDQUOT),
    "unlink": (EROFS, ENOMEM),
    "rmdir": (EROFS, ENOMEM),
    "write": FULL,
    "fallocate": FULL,
    "truncate": FULL,
    "fsync": FULL,
    "mmap": (ENOMEM,),
    "flock": (ENOLCK, ENOSYS),
    "lock": (ENOLCK, ENOSYS),
}
# Weights, cache, and activations on the disk; weights in 4 bits are written there first.
OFFLOADED = ["--policy", "4x1,0,0,0,0,0,0", "--precision", "4bit"]
MOVES = r"FLEXGEN_HELM_HOME|--offload-dir| -o\b|--out\b|--local-path"
REMEDIES = {
    EMFILE: r"ulimit -n",
    ENOMEM: "memory",
    ENOSPC: f"free some room|full|{MOVES}",
    EDQUOT: f"quota|{MOVES}",
    EFBIG: rf"ulimit -f|{MOVES}",
    EIO: f"dmesg|{MOVES}",
}
# What does not help against them.
MISLEADING = re.compile(
    r"Traceback|\[Errno|unexpected|Timeout \(|fetch it again|make it again|install|unverified"
)
_TIMES = re.compile(r"\d+(\.\d+)?( (ms|s|min|tokens/s))|\d\d:\d\d:\d\d")


@dataclass(frozen=True)
class Fault:
    """The call that fails, as failing_calls.c names it; `lasts`: and all that follow."""

    call: str
    number: int
    error: int
    lasts: bool

    @property
    def kind(self) -> str:
        return self.call.split()[0]

    def __str__(self) -> str:
        return (
            f"{self.call} #{self.number} {errorcode[self.error]}{' for good' if self.lasts else ''}"
        )


# What commands read


def _model(folder: Path) -> None:
    from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

    save_random(folder / "model", llama_config(max_position_embeddings=2000), seed=1)
    save_tokenizer(folder / "model")


def _requests(folder: Path) -> None:
    bodies = (
        {"prompt": f"Tell me about {number}", "max_tokens": 8, "logprobs": 1, "seed": 1}
        for number in range(6)
    )
    lines = (
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": b}
        for i, b in enumerate(bodies)
    )
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _text(folder: Path) -> None:
    (folder / "text.txt").write_text(
        (ROOT / "SECURITY.md").read_text(encoding="utf-8")[:600], encoding="utf-8"
    )


def _tasks(folder: Path) -> None:
    from tests.helpers.lm_eval_tasks import invented_tasks

    invented_tasks(folder / "tasks", 4)


def _pickled(folder: Path) -> None:
    pickled_model(folder / "pickled")


# What commands answer


def _suite(folder: Path, output: str) -> object:
    from tests.helpers.helm_runs import Place

    return Place(folder).results()


def _quickstart(folder: Path, output: str) -> object:
    from tests.helpers.helm_runs import Place

    return Place(folder).results("quickstart")


def _lines(folder: Path, output: str) -> object:
    lines = map(json.loads, (folder / "out" / "out.jsonl").read_text().splitlines())
    return [{**line["response"]["body"], "id": "", "created": 0} for line in lines]


def _files(folder: Path, output: str) -> object:
    return {file.name: file.read_bytes() for file in (folder / "out" / "converted").iterdir()}


def _harness(folder: Path, output: str) -> object:
    *_, file = sorted((folder / "out").rglob("results_*.json"))  # their names have the time
    return json.loads(file.read_text())["results"]


def _printed(pattern: str) -> Callable[[Path, str], object]:
    """Return what reads the part of the output that a pattern finds."""

    def read(folder: Path, output: str) -> object:
        found = re.search(pattern, output, re.DOTALL | re.MULTILINE)
        return found and _TIMES.sub("#", found[0])

    return read


@dataclass(frozen=True)
class Command:
    """words: None for a suite. read: (folder, output) -> what is equal whenever it succeeds.

    prepare: write into the folder `in`. before: the command that is run once, undisturbed,
        beforehand.
    """

    words: list[str] | None
    read: Callable[[Path, str], object]
    prepare: tuple[Callable[[Path], None], ...] = (_model,)
    before: list[str] | None = None


_BATCH = [
    "batch",
    "in/in.jsonl",
    "-o",
    "out/out.jsonl",
    "--model",
    "tiny",
    "--offload-dir",
    "out/offload",
]
COMMANDS = {
    "run": Command(None, _suite, ()),
    "batch": Command([*_BATCH, *OFFLOADED, "--batch-invariant"], _lines, (_model, _requests)),
    "divergence": Command(
        ["divergence", "tiny", "--text", "in/text.txt", "--window", "40", "--json", "--offload-dir", "out/offload"],
        _printed(r"^\{.*^\}"),
        (_model, _text),
    ),
    "verify": Command(
        ["verify", "out/out.jsonl", "--requests", "in/in.jsonl", "--bundle", "out/bundle.jsonl.zst"],
        _printed("passed.*?$"),
        (_model, _requests),
        _BATCH,
    ),
    "plan": Command(
        ["plan", "--model", "tiny", "--prompt-len", "64", "--gen-len", "8", "--hardware", "measured"],
        _printed("tiny on .*?$"),
    ),
    "profile": Command(["profile", "--offload-dir", "out/offload", "--out", "out/profile.json"], _printed("measured")),
    "convert": Command(["convert", "in/pickled", "--out", "out/converted"], _files, (_pickled,)),
    "lm-eval": Command(
        ["lm-eval", "--model_args", "pretrained=tiny,cpu_memory=1GiB,device=cpu,offload_dir=out/offload",
         "--include_path", "in/tasks", "--tasks", "choices", "sums", "--output_path",
         "out/results"],
        _harness, (_model, _tasks),
    ),
    "quickstart": Command(["quickstart", "-m", "2"], _quickstart),
}  # fmt: skip


class FailingCalls:
    """A command whose calls can be made to fail; `calls` of an undisturbed one, `right` is its
    result.
    """

    def __init__(self, suites: Suites, name: str) -> None:
        self._suites, self._name, self._command = suites, name, COMMANDS[name]
        self._folder, self._first = suites.folder / name, suites.folder / f"{name}-first"
        for folder in ("in", "out"):
            (self._first / folder).mkdir(parents=True)
        for prepare in self._command.prepare:
            prepare(self._first / "in")
        shutil.copytree(self._first, self._folder)
        if self._command.before is not None:
            outcome = self._order(self._command.before, None)
            assert outcome.code == 0, outcome.output
            shutil.rmtree(self._first)
            shutil.copytree(self._folder, self._first)
        outcome = self.run()
        assert outcome.code == 0, outcome.output
        self.calls = Counter(self._calls().splitlines())
        self.right = self._result(outcome)
        assert self.right, outcome.output

    def _calls(self) -> str:
        calls = self._folder / "calls"
        return calls.read_text() if calls.exists() else ""

    def _order(self, words: list[str] | None, fault: Fault | None) -> Outcome:
        order: dict[str, Any] = (
            {"options": OFFLOADED} if words is None else {"converts": False, "command": words}
        )
        if words is not None:
            order["model"] = str(self._folder / "in" / "model")
        failing = (fault.call, fault.number, fault.error, fault.lasts) if fault else None
        return self._suites.run(self._name, fault=failing, batch_invariant=False, **order)

    def run(self, fault: Fault | None = None) -> Outcome:
        return self._order(self._command.words, fault)

    def _result(self, outcome: Outcome) -> object:
        try:
            return self._command.read(self._folder, outcome.output)
        except (OSError, ValueError):
            return None

    def try_one(self, fault: Fault) -> tuple[Outcome, str]:
        """Run the command with a fault from the beginning; if it ends with an error, again without.

        Return the first outcome, and what was wrong, '' for nothing.
        """
        shutil.rmtree(self._folder)
        shutil.copytree(self._first, self._folder)
        first = self.run(fault)
        if "FAILED" not in self._calls():
            return first, "not reached"
        wrong = self._wrong(first, re.compile(REMEDIES.get(fault.error, MOVES)))
        if first.code:
            again = self.run()
            if again.code or self._result(again) != self.right:
                wrong += f"; the same command afterwards: {again.code} {again.output}"
        return first, wrong

    def _wrong(self, outcome: Outcome, remedy: re.Pattern[str]) -> str:
        said = [line for line in outcome.output.splitlines() if line.startswith("flexgen-helm: ")]
        if found := MISLEADING.search(outcome.output):
            return f"says {found[0]}"
        if outcome.code == 0:
            return "" if self._result(outcome) == self.right else "another result"
        if outcome.code not in (1, 2) or not said:
            return f"exit code {outcome.code} without a sentence"
        if not all(remedy.search(line) for line in said):
            return "nothing that helps"
        if not all(
            re.search(rf"{self._folder}|benchmark_output|prod_env|\b(in|out)\b", line)
            for line in said
        ):
            return "no file"
        return ""

    def faults(self, per_call: int = 1, seed: int = 7) -> list[Fault]:
        """So many faults of a call, in a random order, the same one in every folder."""
        draw, faults = random.Random(seed), []
        for call, count in sorted(
            self.calls.items(), key=lambda item: re.sub("[0-9a-f#]{6,}", "", item[0])
        ):
            errors = ERRORS[call.split()[0]]
            for turn in range(per_call):
                number = 0 if not turn else draw.randrange(count)
                faults.append(Fault(call, number, draw.choice(errors), draw.random() < 0.4))
        draw.shuffle(faults)
        return list(dict.fromkeys(faults))


def compiled(folder: Path) -> Path | None:
    """Return the library that lets calls fail; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source, library = ROOT / "tests" / "helpers" / "failing_calls.c", folder / "failing_calls.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True
    )
    return library


def _sweep(count: int, seed: int, names: list[str]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    table: Counter[tuple[str, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        packages = ["lm_eval.evaluator"] if "lm-eval" in names else []
        with Suites(
            Path(folder), pickled_model(Path(folder) / "model"), compiled(Path(folder)), *packages
        ) as suites:
            for name in names:
                command = FailingCalls(suites, name)
                print(name, len(command.calls), "calls", sum(command.calls.values()), flush=True)
                drawn = [
                    f
                    for f in command.faults(3, seed)
                    if f.error in (*FULL, EMFILE) or f.kind == "mmap"
                ]
                reached = 0
                for fault in drawn:
                    if reached == count:
                        break
                    outcome, wrong = command.try_one(fault)
                    reached += wrong != "not reached"
                    end = wrong.partition(":")[0] or (
                        "right result" if outcome.code == 0 else "one sentence"
                    )
                    table[name, fault.kind, end] += 1
                    said = [
                        line
                        for line in outcome.output.splitlines()
                        if line.startswith("flexgen-helm: ")
                    ]
                    print(f"{name}: {fault}: {end}: {said}", flush=True)
                    if wrong not in ("", "not reached"):
                        print(f"WRONG {wrong}\n{outcome.output}", flush=True)
    for (name, kind, end), number in sorted(table.items()):
        print(f"{name:12} {kind:10} {end:24} {number}")


if __name__ == "__main__":
    _sweep(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or [*COMMANDS])
