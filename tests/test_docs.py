"""The docs name only what exists: links, files, variables, commands, make targets; generated pages
are up to date.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import load

DOCS = ROOT / "docs"
TEXT = {".py", ".md", ".cfg", ".toml", ".yml", ".yaml", ".conf", ".html"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages():
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def name_of(path):
    return str(path.relative_to(ROOT))


def test_tables_have_a_head():
    rows = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
    for page in pages():
        for table in rows.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            assert re.match(r".*\n\|[-:| ]+\|\n", table), (name_of(page), table)


def tracked_text():
    """Name and text of the repository's own files, those that git does not know yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and (path.suffix in TEXT or name == "Makefile"):
            yield name, path.read_text(encoding="utf-8")


def absent_pages(text):
    """Paths such as docs/helm.md that are named in a text and do not exist."""
    named = re.findall(
        r"(?<![\w./-])((?:docs|tests|examples|benchmarks|scenarios|runs)/[\w./-]*[\w-]\.\w+)", text
    )
    return sorted({name for name in named if not (ROOT / name).exists()})


def test_pages_and_files_that_are_named_exist():
    this = name_of(Path(__file__))
    found = {
        name: absent
        for name, text in tracked_text()
        if name != this and (absent := absent_pages(text))
    }
    assert found == {}


def test_an_absent_page_is_found():
    assert absent_pages("see docs/helm.md, docs/index.md and `tests/nowhere.py`") == [
        "docs/helm.md",
        "tests/nowhere.py",
    ]


def test_every_environment_variable_is_described():
    listed = set(
        re.findall(
            r"^\| `(FLEXGEN_HELM_\w+)`",
            (DOCS / "reference/environment.md").read_text(),
            re.MULTILINE,
        )
    )
    shipped = ("flexgen_helm/", "scenarios/", "benchmarks/")
    used = {
        name
        for file, text in tracked_text()
        if file.startswith(shipped)
        for name in re.findall(r"FLEXGEN_HELM_[A-Z_]+", text)
    }
    assert listed == used


def test_the_command_reference_is_up_to_date():
    made = load(DOCS / "commands.py").page()
    assert (DOCS / "reference" / "commands.md").read_text() == made, "run `make pages`"


def test_the_catalogue_of_errors_is_up_to_date():
    assert (DOCS / "reference" / "errors.md").read_text() == load(DOCS / "errors.py").page(), (
        "run `make pages`"
    )


@pytest.mark.fast(1)
def test_the_chart_is_up_to_date():
    assert (DOCS / "images" / "measured.svg").read_text() == load(DOCS / "figures.py").chart(), (
        "run `make pages`"
    )


def shell_lines(text):
    """Lines of a page's code blocks, continued lines joined, without prompts."""
    for _, block in FENCE.findall(text):
        yield from (line.removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines())


def shown_commands():
    """Command lines of the docs that can be typed as they are, without what a shell does with their
    output.
    """
    lines = {line for page in pages() for line in shell_lines(page.read_text(encoding="utf-8"))}
    typed = {line.partition(" >")[0] for line in lines if line.startswith("flexgen-helm ")}
    return sorted(line for line in typed if not re.search(r"[<…\[]|\b(MODEL|ENTRY)\b", line))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The current folder has what a checkout has, and the files of run entries that readers
    write.
    """
    for name in ("benchmarks", "runs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("my_runs", "mine", "night", "first", "second"):
        text = '{description: "simple_mcqa:model=flexgen/opt-125m", priority: 1}'
        (tmp_path / f"{name}.conf").write_text(f"entries: [\n{text}\n]\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.fast(3)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] if " -c " in line or " -r " in line else [])
        for line in shown_commands()
        if line.startswith("flexgen-helm plan ")
    ],
)
def test_plans_that_the_docs_show_are_made(line, checkout, capsys):
    from flexgen_helm.cli import main

    words = shlex.split(line, comments=True)[1:]
    words += [] if "--hardware" in words else ["--hardware", "laptop"]
    code, said = main(words), capsys.readouterr().err
    if "--suite" in words:  # whose prompts are not here; the suite's own tests plan with some
        assert code == 2 and "make its prompts with `flexgen-helm run --dry-run -c " in said
    else:
        assert code == 0, said


def test_arguments_that_the_docs_show_are_taken(checkout):
    """Parsed as the command does; run entries and files of `run` are found, too."""
    from flexgen_helm.cli.app import command_line
    from flexgen_helm.cli.helm_flags import check_helm_flags, parse_helm_flags
    from flexgen_helm.config import FLAGS, EngineConfig, options_of_flags
    from flexgen_helm.run_entries import check_entries_of_flags

    root: Any = command_line()
    for line in shown_commands():
        name, *words = shlex.split(line, comments=True)[1:]
        context = root.commands[name].make_context(name, words)
        if name != "run":
            continue
        check_helm_flags(context, context.args)
        check_entries_of_flags(parse_helm_flags(context.args), needs_weights=False)
        options = options_of_flags({flag: context.params.get(flag) for flag in FLAGS})
        for precision in str(options.pop("precision", "fp16")).split(","):
            EngineConfig(**options, precision=precision)
