"""Write docs/reference/commands.md from the command line itself: `make pages`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flexgen_helm.cli.app import command_line

PAGE = Path(__file__).resolve().parent / "reference" / "commands.md"
SHARED_PANELS = ("Prompts", "Engine")  # described once, at the end
HEAD = """# Commands

<!-- Made from the command line by `make pages`; edit the help texts in flexgen_helm/cli instead. -->

`flexgen-helm` writes data to stdout, and progress and errors to stderr. The exit code is 0 for done, 1 for failed,
2 for wrong usage or refused, and 130 for interrupted. Engine options are the same for every command that runs or plans
an engine; they are listed [at the end](#engine-options), as are those of prompts.

`flexgen-helm --install-completion` lets the shell complete commands, options, and names of models, precisions,
schedules, devices, and machines.
"""
SHARED_HEAD = """## {title} options

{commands} accept these options.
[`Engine.from_pretrained`](python.md) and a deployment's `args` take the same settings.
"""


def page() -> str:
    """The page's markdown."""
    root: Any = command_line()
    shared = {panel: _shared(root, panel) for panel in SHARED_PANELS}
    sections = [_section(name, command, shared) for name, command in root.commands.items()]
    for panel, options in shared.items():
        commands = [
            f"`{name}`" for name, command in root.commands.items() if _of_panel(command, panel)
        ]
        head = SHARED_HEAD.format(
            title=_title(panel), commands=f"{', '.join(commands[:-1])} and {commands[-1]}"
        )
        sections.append(f"{head}\n{_options(options.values())}")
    return "\n".join([HEAD, *sections])


def _title(panel: str) -> str:
    return panel.removesuffix("s")


def _of_panel(command: Any, panel: str) -> dict[str, Any]:
    return {param.name: param for param in command.params if param.rich_help_panel == panel}


def _shared(root: Any, panel: str) -> dict[str, Any]:
    """All options of the panel, of whichever command."""
    return {
        name: param
        for command in root.commands.values()
        for name, param in _of_panel(command, panel).items()
    }


def _section(name: str, command: Any, shared: dict[str, dict[str, Any]]) -> str:
    params = [
        param
        for param in command.params
        if param.rich_help_panel not in shared and param.name != "help"
    ]
    arguments = [param for param in params if _is_argument(param)]
    words = [f"flexgen-helm {name}", *(_word(param) for param in arguments), "[OPTIONS]"]
    if command.context_settings.get("allow_extra_args"):
        words.append(f"[OPTIONS OF {'HELM-RUN' if name == 'run' else 'THE HARNESS'}]")
    parts = [f"## {name}\n", f"```text\n{' '.join(words)}\n```\n", f"{_help_text(command.help)}\n"]
    for panel in dict.fromkeys(param.rich_help_panel for param in params):
        parts += [f"Options of {panel}:\n"] if panel else []
        parts.append(_options(param for param in params if param.rich_help_panel == panel))
    links = [
        _link(command, panel, options)
        for panel, options in shared.items()
        if _of_panel(command, panel)
    ]
    return "\n".join(
        [*parts, f"It also accepts the {' and the '.join(links)}.\n"] if links else parts
    )


def _link(command: Any, panel: str, options: dict[str, Any]) -> str:
    title = _title(panel)
    absent = [
        f"`{options[name].opts[0]}`" for name in options if name not in _of_panel(command, panel)
    ]
    without = f" (without {', '.join(absent)})" if absent else ""
    return f"[{title.lower()} options](#{title.lower()}-options){without}"


def _help_text(text: str) -> str:
    """Paragraphs of a docstring; an example and indented lines become code blocks."""
    # an example's lines stay together
    paragraphs = inspect.cleandoc(text).replace("\n\n  ", "\n  ").split("\n\n")
    return "\n\n".join(map(_paragraph, paragraphs))


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
    value = (
        "" if _is_argument(param) or param.is_flag else f" {param.metavar or param.name.upper()}"
    )
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
