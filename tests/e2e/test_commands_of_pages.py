"""Every command of README, tutorial and guides runs as it is printed, and prints what the page
shows but for figures.

A tiny model has the names of all models, `-m` is a few instances, and folders of the reader are
below the test's.
`plan` and `models` see the catalog's models.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.forks import python
from tests.helpers.gguf_files import Kind, gguf_of
from tests.helpers.paths import ROOT
from tests.helpers.real_runs import MAIN
from tests.helpers.tiny_models import llama_config, save_random, save_tokenizer

PAGES = [
    "README.md",
    "docs/tutorial.md",
    *(f"docs/how-to/{p.name}" for p in (ROOT / "docs/how-to").glob("*.md")),
]
NAMES = [
    "smollm2-135m-instruct-q4_1", "smollm2-135m-instruct", "smollm2-f16", "llama-3.1-8b-instruct",
    "llama-3.1-8b", "pythia-1b", "opt-30b",
]  # fmt: skip
# What is not run, and why.
LEFT_OUT = {
    r"make (eval|test)$|pip install|python3? -m venv|\. \.venv|python -m nltk": "installs",
    r"flexgen-helm fetch|.*--tasks (arc_easy|mmlu)": "asks the network",
    r"flexgen-helm run -c mine\.conf|helm-summarize --suite lite": "data of the hub",
    r"helm-server|tail -f|flexgen-helm serve|curl|inspect "
    r"eval|lm-eval run": "waits; tests/harnesses has servers",
    r".*--ray|(RAY_\S+ )?ray |torchrun": "tests/distributed, tests/pipeline",
    r".*(\bMODEL\b|\bSUITE\b|DATE|…)": "a word to replace",
    r"flexgen-helm verify forged": "tests/e2e/test_verify.py forges",
    r"flexgen-helm doctor pythia-1b": "a model of the hub",
    r"flexgen-helm convert": "weights in pickles; tests/checkpoint/test_convert.py",
    r"helm-run -r mmlu": (
        "names of YAML blocks, which nothing here writes; tests/e2e/test_helm_run.py has such names"
    ),
}
# A console script of a package.
SCRIPT = """
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="{}")
script.load()()
"""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Lines of what is shown that depend on the model, by their beginnings.
OF_THE_MODEL = re.compile(
    r"simple_mcqa_scored$|lambada|target_perplexity|exact_match +too few|lost|can show|other "
    r"data|are not computed"
    r"|smollm2-q|×|Next:|\d?bit: too few|4bit: |layer \d+|embedding|files: |baseline: |mine: "
    r"|\(No room|Tokens of|- HELM|after +error"
)


@dataclass
class Block:
    """Commands, and what the page shows of their output; or a file, if it has a name."""

    commands: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    program: str = ""


def blocks(text):
    found: list[Block] = []
    for language, content in FENCE.findall(text):
        lines = content.splitlines()
        if language == "python":
            found.append(Block(program=content))
        elif language == "text" and found and not content.startswith("entries: ["):
            found[-1].shown += lines
        elif language in ("", "console"):
            is_console = language == "console"
            for line in content.replace("\\\n", " ").splitlines():
                if not is_console or line.startswith("$ "):
                    found.append(Block([line.removeprefix("$ ")]))
                else:
                    found[-1].shown.append(line)
    return found


def why_left_out(command):
    return next((why for pattern, why in LEFT_OUT.items() if re.match(pattern, command)), "")


def kind(line):
    """A line without figures, bars, and widths of columns."""
    line = re.sub(r"[█─]+", "", re.sub(r"\d[\d,.:]*", "#", line))
    return re.sub(r"[\s*+-]+", " ", line).strip()


def test_every_command_is_run_or_left_out_for_a_reason():
    commands = [
        c for page in PAGES for block in blocks((ROOT / page).read_text()) for c in block.commands
    ]
    assert len(commands) > 90
    left_out = [command for command in commands if why_left_out(command)]
    assert len(left_out) < len(commands) / 2
    unused = [
        pattern
        for pattern in LEFT_OUT
        if not any(re.match(pattern, command) for command in commands)
    ]
    assert unused == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = llama_config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, max_position_embeddings=9000
    )
    save_random(folder, config, seed=1)
    save_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": template})
    )
    return folder


class Reader:
    """Someone who types what a page prints, in a folder that has what the page says."""

    def __init__(self, page, folder, model):
        self.folder, self.text = folder, (ROOT / page).read_text(encoding="utf-8")
        self.blocks = blocks(self.text)
        (folder / "runs").symlink_to(ROOT / "runs")
        (folder / "models").mkdir()
        (folder / "models" / "my-opt").symlink_to(model)
        self.names = dict.fromkeys([*NAMES, "HuggingFaceTB--SmolLM2-135M"], str(model))
        (folder / "models.yaml").write_text(json.dumps(self.names))
        self._write_files(model)
        self._write_mmlu()
        programs = {"flexgen-helm": [*python("all"), "-c", MAIN], "python": [*python("all")]}
        programs |= {
            name: [*python("all"), "-c", SCRIPT.format(name)]
            for name in ("helm-run", "helm-summarize")
        }
        (folder / "bin").mkdir()
        for name, words in programs.items():
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (folder / "bin" / name).chmod(0o755)
        self.variables = {
            **os.environ, "HF_HUB_OFFLINE": "1", "FLEXGEN_HELM_HOME": str(folder / "home"), "COLUMNS": "98",
            "PATH": f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FLEXGEN_HELM_MODELS": str(folder / "models.yaml"),
        }  # fmt: skip

    def _write_files(self, model):
        (self.folder / "text.txt").write_text(
            (ROOT / "SECURITY.md").read_text(encoding="utf-8")[:9000]
        )
        suites = (ROOT / "docs/how-to/suites.md").read_text(encoding="utf-8")
        for language, content in [*FENCE.findall(suites), *FENCE.findall(self.text)]:
            if content.startswith("entries: ["):
                for name in ("my_runs", "first", "second", "night"):
                    (self.folder / f"{name}.conf").write_text(content)
            elif language == "json":
                (self.folder / "capitals.jsonl").write_text(content)
            elif content.startswith("task: "):
                (self.folder / "capitals.yaml").write_text(content)
            elif content.startswith("my-opt:"):
                there = content.replace("/models/", f"{self.folder}/models/")
                (self.folder / "models.yaml").write_text(
                    there + "".join(f"{n}: {m}\n" for n, m in self.names.items())
                )
            elif content.startswith("# prod_env/"):
                (self.folder / "prod_env").mkdir()
                there = content.replace("/models/", f"{self.folder}/models/")
                (self.folder / "prod_env" / "model_deployments.yaml").write_text(there)
        for block in self.blocks:
            for name in re.findall(r"^cat (\w+\.jsonl)$", "\n".join(block.commands)):
                # The tiny model's tokens have smaller ids.
                content = "".join(f"{line}\n" for line in block.shown).replace(
                    "[504, 3575]", "[104, 75]"
                )
                (self.folder / name).write_text(content)
        if not (self.folder / "requests.jsonl").exists():
            line = {
                "custom_id": "1",
                "url": "/v1/completions",
                "body": {"prompt": "The", "model": NAMES[0]},
            }
            (self.folder / "requests.jsonl").write_text(json.dumps(line) + "\n")
        if ".gguf" in self.text:
            self.names["smollm2-f16"] = str(gguf_of(model, self.folder / "f16.gguf", Kind.F16))
            gguf_of(model, self.folder / "q4_0.gguf", Kind.Q4_0)
            (self.folder / "models.yaml").write_text(json.dumps(self.names))

    def _write_mmlu(self):
        """Made-up questions, where HELM looks for those that it has downloaded."""
        for subject in ("anatomy", "abstract_algebra", "us_foreign_policy"):
            for split in ("dev", "val", "test"):
                folder = self.folder / "benchmark_output" / "scenarios" / "mmlu" / "data" / split
                folder.mkdir(parents=True, exist_ok=True)
                rows = (
                    f"Is {n} of {subject} even?,yes,no,perhaps,never,{'AB'[n % 2]}\n"
                    for n in range(5)
                )
                (folder / f"{subject}_{split}.csv").write_text("".join(rows))

    def typed(self, number, block):
        """Return the lines of a block for the shell."""
        if block.program:
            programs = [one.program for one in self.blocks[: number + 1] if one.program]
            # the others go on
            last = max(i for i, program in enumerate(programs) if "import " in program)
            (self.folder / f"program{number}.py").write_text("\n".join(programs[last:]))
            return f"python program{number}.py"
        lines = []
        for command in block.commands:
            line = re.sub(r"(?<=[ =])/(fast|models)", rf"{self.folder}/\1", command)
            if "--sample 100" not in self.text:  # which needs as many answers
                line = re.sub(r" -m (\d+)", lambda found: f" -m {min(4, int(found[1]))}", line)
            if re.match(r"flexgen-helm (plan .*--model|models)", line) and " -c " not in line:
                line = f"FLEXGEN_HELM_MODELS= {line}"
            if line.partition("helm ")[2].startswith("plan ") and "--hardware" not in line:
                line += " --hardware laptop"  # measuring takes half a minute
            lines.append(f"{line}\nwait" if line.endswith("&") else line)
        return "\n".join(lines)

    def read(self):
        """Type all that is run; return the exit code and the output of each block."""
        runs = {
            number: self.typed(number, block)
            for number, block in enumerate(self.blocks)
            if not any(map(why_left_out, block.commands)) and "inspect_ai" not in block.program
        }
        before = "flexgen-helm batch requests.jsonl -o answers.jsonl\n" * (
            "verify answers.jsonl" in self.text
        )
        script = before + "".join(
            f"echo; echo '@@{number}'\n{lines}\ncode=$?; echo; echo @@@$code\n"
            for number, lines in runs.items()
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.variables, text=True, timeout=400,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        parts = re.findall(r"^@@(\d+)\n(.*?)^@@@(\d+)$", done.stdout, re.MULTILINE | re.DOTALL)
        assert len(parts) == len(runs), done.stdout
        return {int(number): (int(code), said) for number, said, code in parts}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_run_and_print_what_the_page_shows(page, model, tmp_path):
    reader = Reader(page, tmp_path, model)
    wrong = {}
    for number, (code, said) in reader.read().items():
        block = reader.blocks[number]
        lines = {kind(line) for line in said.splitlines()}
        # of other runs, as the pages say
        shown = [] if "compare" in " ".join(block.commands) else block.shown
        unseen = [
            line for line in shown
            if kind(line) not in lines and line.strip() not in ("", "…") and not OF_THE_MODEL.match(line.strip())
        ]  # fmt: skip
        if code or unseen or "Traceback" in said:
            wrong["; ".join(block.commands) or block.program] = {
                "code": code,
                "not printed": unseen,
                "printed": said,
            }
    assert not wrong, "\n".join(
        f"{command}\n{json.dumps(how, indent=1, ensure_ascii=False)}"
        for command, how in wrong.items()
    )


@pytest.mark.slow
def test_the_first_score_is_that_of_the_page(wheel_model, tmp_path):
    """Of the real model, in all digits."""
    home = tmp_path / "home" / "models" / wheel_model.parent.name
    home.parent.mkdir(parents=True)
    home.symlink_to(wheel_model.parent)
    for page in ("README.md", "docs/tutorial.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        (block,) = [
            b
            for b in blocks(text)
            if any("--suite first" in c and "-r simple" in c for c in b.commands) and b.shown
        ]
        words = shlex.split(block.commands[0])
        variables = {
            "FLEXGEN_HELM_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "98",
        }
        done = subprocess.run(
            [*python("all"), "-c", MAIN, *words[1:]], cwd=tmp_path, env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
        for line in block.shown:
            assert " ".join(line.split()) in printed or "per second" in line, (line, done.stdout)
