"""Write docs/reference/commands.md from the command line itself: `make pages`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from flexgen_helm.cli.app import app

PAGE = Path(__file__).resolve().parent / "reference" / "commands.md"
ENGINE_PANEL = "Engine"
HEAD = """# Commands

<!-- Made from the command line by `make pages`; edit the help texts in flexgen_helm/cli instead. -->

`flexgen-helm` writes data to stdout, and progress and errors to stderr. The exit code is 0 for done, 1 for failed,
2 for wrong usage or refused, and 130 for interrupted. Engine options are the same for every command that runs or
plans an engine; they are listed [at the end](#engine-options).

`flexgen-helm --install-completion` lets the shell complete commands, options, and names of models, precisions,
schedules, devices, and machines.
"""
ENGINE_HEAD = """## Engine options

{commands} accept these options.
[`Engine.from_pretrained`](python.md) and a deployment's `args` take the same settings.
"""


def page() -> str:
    """The page's markdown."""
    root: Any = typer.main.get_command(app)
    sections, engine_options, with_engine = [], {}, []
    for name, command in root.commands.items():
        own = [param for param in command.params if param.rich_help_panel != ENGINE_PANEL and param.name != "help"]
        shared = [param for param in command.params if param.rich_help_panel == ENGINE_PANEL]
        if shared:
            with_engine.append(f"`{name}`")
            engine_options = {param.name: param for param in shared}
        sections.append(_section(name, command, own, bool(shared)))
    last = " and ".join([", ".join(with_engine[:-1]), with_engine[-1]])
    engine = ENGINE_HEAD.format(commands=last) + "\n" + _options(engine_options.values())
    return "\n".join([HEAD, *sections, engine])


def _section(name: str, command: Any, params: list[Any], has_engine_options: bool) -> str:
    arguments = [param for param in params if _is_argument(param)]
    words = [f"flexgen-helm {name}", *(_word(param) for param in arguments), "[OPTIONS]"]
    if command.context_settings.get("allow_extra_args"):
        words.append(f"[OPTIONS OF {'HELM-RUN' if name == 'run' else 'THE HARNESS'}]")
    parts = [f"## {name}\n", f"```text\n{' '.join(words)}\n```\n", f"{_help_text(command.help)}\n"]
    panels = dict.fromkeys(param.rich_help_panel for param in params)
    for panel in panels:
        parts += [f"Options of {panel}:\n"] if panel else []
        parts.append(_options(param for param in params if param.rich_help_panel == panel))
    if has_engine_options:
        parts.append("It also accepts the [engine options](#engine-options).\n")
    return "\n".join(parts)


def _help_text(text: str) -> str:
    """Paragraphs of a docstring; an example and indented lines become code blocks."""
    return "\n\n".join(map(_paragraph, inspect.cleandoc(text).split("\n\n")))


def _paragraph(text: str) -> str:
    if text.startswith("Example: "):
        return f"```text\n{text.removeprefix('Example: ')}\n```"
    head, _, rest = text.partition("\n")
    if not rest.startswith(" "):
        return text
    block = f"```text\n{inspect.cleandoc(chr(10) + rest)}\n```"
    return block if head == "Example:" else f"{head}\n\n{block}"


def _options(params: Iterable[Any]) -> str:
    return "\n".join(_option(param) for param in params) + "\n"


def _option(param: Any) -> str:
    names = _word(param) if _is_argument(param) else ", ".join(param.opts)
    value = "" if _is_argument(param) or param.is_flag else f" {param.metavar or param.name.upper()}"
    notes = ["required"] if param.required else []
    if param.default is not None and not isinstance(param.default, bool):
        notes.append(f"default: `{param.default}`")
    return f"- `{names}{value}`: {param.help}" + (f" ({'; '.join(notes)})" if notes else "")


def _is_argument(param: Any) -> bool:
    return not param.opts[0].startswith("-")


def _word(param: Any) -> str:
    word = str(param.metavar or param.name).upper()
    return word if param.required else f"[{word}]"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
