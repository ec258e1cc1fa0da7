"""`flexgen-helm entries`: run entries that can be pasted, the data that each needs, and whether it
is here.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from flexgen_helm.cli.arguments import DEFAULT_OUTPUT, JsonFlag, OutputPath
from flexgen_helm.cli.console import output, print_json, print_rows
from flexgen_helm.cli.models import say_example
from flexgen_helm.errors import UsageError

FILES = ("quickstart.conf", "accuracy.conf", "data_wrangling.conf", "paper_helm7.conf")
# Long; listed where their names are asked for.
LEADERBOARDS = (
    "helm_capabilities.conf",
    "helm_safety.conf",
    "helm_lite.conf",
    "helm_lite_instruct.conf",
)


def entries(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of a run entry, file or data set.")
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Also HELM's leaderboards, and scenarios of which only the name is known here.",
        ),
    ] = False,
    output_path: OutputPath = DEFAULT_OUTPUT,
    as_json: JsonFlag = False,
) -> None:
    """List run entries that are shipped or need no download: the data each needs, and whether it is
    here.

    Append ,model=flexgen/NAME to an entry (:model=flexgen/NAME where it has no arguments), and give
    it to run -r.
    With follow_format_instructions the model comes first. `flexgen-helm entries helm_` lists HELM's
    leaderboards.
    HELM has some 300 scenarios more (--all), which download their data when they run, and have
    arguments of their own.

    Example: flexgen-helm entries mmlu --all
    """
    listed = all_rows(output_path, every, leaderboards=every or pattern is not None)
    wanted = (pattern or "").lower()
    rows = [
        row
        for row in listed
        if wanted in f"{row['run_entry']} {row['source']} {row['needs']}".lower()
    ]
    if not rows:
        raise UsageError(
            f"no run entry has {pattern!r} in its name; `flexgen-helm entries --all` lists all "
            "scenarios"
        )
    if as_json:
        print_json({"entries": rows})
        return
    from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
    from flexgen_helm.runs.data import VARIABLE

    cells = [
        (row["run_entry"], row["source"], row["needs"], "yes" if row["is_here"] else "no")
        for row in rows
    ]
    print_rows(["run entry", "from", "needs", "here"], cells, ("from",))
    folders = ", ".join(dict.fromkeys(row["folder"] for row in rows if row["folder"] is not None))
    output().print(
        f"Data that is here: {folders or 'none'}. {VARIABLE} names the folder of LAMBADA and "
        f"WikiText-2; a run downloads other data into {output_path / 'scenarios'}. Without a "
        "network, copy that folder from a machine that ran them.",
        width=100,
    )
    say_example(WHEEL_MODEL)


def all_rows(
    output_path: Path, every: bool = False, leaderboards: bool = False
) -> list[dict[str, Any]]:
    """Return the entries of the files in runs/, and those of HELM that need no data.

    every: also the other scenarios of HELM, of which only the names are known.
    leaderboards: also the entries of HELM's leaderboards.

    Keys of a row: run_entry, without a model; source, the file in runs/, 'flexgen_helm' or 'HELM';
    needs, the data set, or 'nothing' if the scenario generates its data; place, where the data
    belongs; is_here; folder, where it is.
    """
    from flexgen_helm.run_entries import parse_entry, read_conf, without_model
    from flexgen_helm.run_specs import our_run_spec_names, run_spec_names
    from flexgen_helm.runs.data import DATA, HELM_ENTRIES

    sources: dict[str, str] = {}
    for name in FILES + LEADERBOARDS if leaderboards else FILES:
        for entry in read_conf(Path(str(files("flexgen_helm.runs") / name))):
            sources.setdefault(without_model(entry), name)
    sources |= {entry: "HELM" for entry in HELM_ENTRIES if entry not in sources}
    # Our run specs before they are in a file of runs/, and scenarios of HELM of which only the name
    # is known.
    known = {parse_entry(entry)[0] for entry in sources}
    new = our_run_spec_names() - known
    sources |= dict.fromkeys(sorted(new), "flexgen_helm")
    sources |= dict.fromkeys(sorted(run_spec_names() - known - new) if every else (), "HELM")
    rows = []
    for entry, source in sources.items():
        scenario, arguments = parse_entry(entry)
        row: dict[str, Any] = {
            "run_entry": entry,
            "source": source,
            "needs": "nothing",
            "place": None,
            "is_here": True,
            "folder": None,
        }
        if scenario not in known:
            row |= {"needs": "its own data", "is_here": False}
        elif (data := DATA[scenario]) is not None:
            folder = data.find(arguments, output_path)
            row |= {"needs": data.title.format_map(arguments), "place": data.place(output_path)}
            row |= {"is_here": folder is not None, "folder": folder and str(folder)}
        rows.append(row)
    return rows
