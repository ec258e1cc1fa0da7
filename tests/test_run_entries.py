"""Run entries are read as HELM reads them, and refused early only where HELM would refuse them
later.
"""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helm.benchmark import run_spec as helm_run_specs
from helm.benchmark.presentation.run_entry import read_run_entries
from helm.benchmark.run_expander import RUN_EXPANDERS, ModelRunExpander
from helm.benchmark.run_spec_factory import construct_run_specs
from helm.common.object_spec import parse_object_spec
from hypothesis import example, given
from hypothesis import strategies as st

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm import run_entries
from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.cli.helm_flags import parse_helm_flags
from flexgen_helm.errors import CheckpointError, UnknownModelError, UsageError
from flexgen_helm.plugin import suite
from flexgen_helm.run_entries import (
    check_entries,
    check_entries_of_flags,
    conf_file,
    entries_of_flags,
    model_hints,
    parse_entry,
    read_conf,
)
from flexgen_helm.run_specs import run_spec_names
from tests.helpers.data_sets import write_legalbench_settings
from tests.helpers.forks import python
from tests.helpers.paths import ROOT
from tests.helpers.shares import share

MODEL = "flexgen/opt-125m"


@given(st.text("ab:=,/1.-", max_size=20))
@example("mmlu")
@example("mmlu:")
@example("mmlu:subject=a,model=b/c-4bit")
@example("a:b=c=d")
@example("a:b:c=d")
@example("a:b=1,b=2")
def test_an_entry_is_read_as_helm_reads_it(entry):
    try:
        theirs = parse_object_spec(entry)
    except ValueError:
        with pytest.raises(UsageError, match="key=value"):
            parse_entry(entry)
        return
    name, arguments = parse_entry(entry)
    assert name == theirs.class_name and list(arguments) == list(theirs.args)
    # HELM makes numbers of what looks like one.
    assert all(
        str(value) == text or isinstance(value, (int, float))
        for value, text in zip(theirs.args.values(), arguments.values())
    )


def test_every_run_spec_of_helm_is_known():
    helm_run_specs.discover_run_spec_functions()
    # Other tests may register run specs of their own.
    registered = {
        name
        for name, function in helm_run_specs._REGISTERED_RUN_SPEC_FUNCTIONS.items()
        if function.__module__.startswith(("helm.", "flexgen_helm."))
    }
    assert run_spec_names() == registered and len(registered) > 300


def test_what_helm_runs_is_accepted():
    """Every run spec with what HELM's own files contain: groups, deployments, expanders, other
    clients' models.
    """
    groups = list(ModelRunExpander("").get_model_group_to_model_names())
    models = [
        *(f"model={group}" for group in groups),
        f"model={MODEL}",
        f"model={MODEL}-4bit-s,model_deployment={MODEL}-4bit-s",
        "model=facebook/opt-125m,model_deployment=huggingface/opt-125m",
        "model=flexgen/org/repo",
        "model=flexgen/org--repo-4bit",
        "model_deployment=together/llama-7b",
        "model=openai/gpt-4o-2024-05-13,max_eval_instances=20,stop=hash,temperature=0.3",
    ]
    for name in share(sorted(run_spec_names()), 4):
        entry = with_arguments(name)
        check_entries([entry, *(f"{entry},{model}" for model in models)], [])
        check_entries(
            [entry, f"{entry},model=text", f"{entry},model=opt-125m"], [MODEL, "openai/gpt2"]
        )
    expanders = [expander for expander in RUN_EXPANDERS if expander != "model"]
    check_entries([f"mmlu:subject=a,{expander}=1,model={MODEL}" for expander in expanders], [])


def with_arguments(name):
    """Return an entry of a run spec with all arguments that it needs, and at least one."""
    helm_run_specs.discover_run_spec_functions()
    function = helm_run_specs.get_run_spec_function(name)
    assert function is not None
    parameters = inspect.signature(function).parameters.values()
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    return f"{name}:{','.join(f'{argument}=1' for argument in needed or ['max_eval_instances'])}"


@pytest.mark.parametrize("conf", sorted((ROOT / "runs").glob("*.conf")), ids=lambda path: path.name)
def test_helm_makes_a_run_of_every_shipped_entry(conf, tmp_path, monkeypatch):
    """Files are read as HELM reads them. Offline; LegalBench's run specs need a file, which the
    test writes.
    """
    monkeypatch.setattr("helm.benchmark.runner._BENCHMARK_OUTPUT_PATH", str(tmp_path))
    write_legalbench_settings(tmp_path)
    entries, runs = [entry.description for entry in read_run_entries([str(conf)]).entries], {}
    assert read_conf(conf) == entries and entries
    check_entries(entries, [])
    for entry in entries:
        (spec,) = construct_run_specs(parse_object_spec(entry))
        assert (
            spec.adapter_spec.model
            == spec.adapter_spec.model_deployment
            == f"flexgen/{WHEEL_MODEL}"
        )
        assert (
            "follow_format_instructions" not in entry
            or "critical to follow" in spec.adapter_spec.global_suffix
        )
        assert not {annotator.class_name for annotator in spec.annotators or []}, (
            f"{entry} needs a judge"
        )
        runs[spec.name] = entry
    assert len(runs) == len(entries)  # no two in one folder


def test_what_is_no_plain_entry_of_a_file_is_left_to_helm(tmp_path):
    conf = tmp_path / "x.conf"
    conf.write_text(
        'x: "text"\nentries: [\n  # {description: "commented:a=b", priority: 1}\n'
        '  // {description: "too", priority: 1}\n'
        '  {description: "a:model="${x}, priority: 1}\n  {description: "b:c=d", priority: 1, '
        'groups: ["g"]},\n'
        '  {\n    description = "e"\n    priority: 2\n  }\n]\n'
    )
    everything = [entry.description for entry in read_run_entries([str(conf)]).entries]
    assert everything == ["a:model=text", "b:c=d", "e"] and read_conf(conf) == ["b:c=d", "e"]


@pytest.mark.parametrize(
    "entry, says",
    [
        (
            f"simple_mcq:model={MODEL}",
            "did you mean simple_mcqa or simple_mcqa_scored.*flexgen-helm entries",
        ),
        (f"zzzz:model={MODEL}", "'zzzz' is not known; `flexgen-helm entries`"),
        (f"mmlu:anatomy,model={MODEL}", "'anatomy' where key=value"),
        ("mmlu:subject=anatomy,model=opt-6.7b", "write model=flexgen/opt-6.7b$"),
        ("mmlu:subject=anatomy,model=opt-6.7b-4bit", "write model=flexgen/opt-6.7b-4bit$"),
        ("simple_mcqa:model=flexgen/opt6.7b", "did you mean opt-6.7b"),
        ("simple_mcqa:model=flexgen/opt-6.7b-5bit", "'5bit' is no precision.*opt-6.7b-4bit"),
        ("simple_mcqa:model=flexgen/llama-3-8b-q4_k_m", "'q4_k_m' is no precision"),
        (
            "simple_mcqa:model=flexgen/smollm2-135m-instruct-q4",
            "write smollm2-135m-instruct-q4_1, smollm2-135m-inst",
        ),
        ("simple_mcqa:model=a/b,model_deployment=flexgen/opt6.7b", "did you mean opt-6.7b"),
        (
            "simple_mcqa:model=flexgen//no/such/folder",
            "there is no model file or folder /no/such/folder",
        ),
        ("simple_mcqa:model=flexgen/a/b/c", "there is no model file or folder a/b/c"),
        (f"mmlu:model={MODEL}", f"lacks subject: write mmlu:subject=…,model={MODEL};"),
        (
            f"mmlu:subjct=anatomy,model={MODEL}",
            "'subjct', .* did you mean subject.* takes subject, method$",
        ),
        (
            f"gsm:size=3,model={MODEL}",
            "'size', which gsm does not take; it takes no arguments of its own$",
        ),
    ],
)
def test_a_wrong_entry_is_answered_with_what_is_right(entry, says):
    with pytest.raises(UsageError, match=says):
        check_entries([f"simple_mcqa:model={MODEL}", entry], [])


def test_all_entries_of_a_command_are_checked(tmp_path):
    conf = tmp_path / "x.conf"
    conf.write_text(
        'entries: [\n  {description: "simple_mcq:model=flexgen/opt-125m", priority: 2}\n]\n'
    )
    with pytest.raises(UsageError, match="did you mean simple_mcqa"):
        check_entries_of_flags(
            parse_helm_flags(
                ["-r", f"simple_mcqa:model={MODEL}", "-c", str(conf), "-m", "10", "--suite", "s"]
            )
        )
    with pytest.raises(UsageError, match="did you mean opt-125m"):
        check_entries_of_flags(
            parse_helm_flags(["-r", "simple_mcqa", "--models-to-run", "flexgen/opt-126m"])
        )
    with pytest.raises(UsageError, match="needs a prefix"):
        check_entries_of_flags(parse_helm_flags(["-r", "simple_mcqa:model=gpt2"]))
    with pytest.raises(UsageError, match="there is no such file"):
        check_entries_of_flags(parse_helm_flags(["-c", "no/such/file"]))
    (tmp_path / "models.yaml").write_text("mine: /models/mine\n")
    with pytest.raises(
        UsageError, match=(r"models\.yaml has no run entries.*goes into FLEXGEN_HELM_MODELS")
    ):
        check_entries_of_flags(parse_helm_flags(["-c", str(tmp_path / "models.yaml")]))
    (tmp_path / "latin.conf").write_bytes(b'entries: [{description: "\xe9"}]')
    for accepted in (
        ["-c", str(tmp_path / "latin.conf"), str(tmp_path)],
        ["-c", str(conf), "--priority", "1"],  # HELM leaves the entry out
        ["-c", str(conf), "--plugins", "theirs"],
        ["-r", "simple_mcqa:model=gpt2", "--enable-huggingface-models", "gpt2"],
        [],
    ):
        assert check_entries_of_flags(parse_helm_flags(accepted)) == []
    assert (
        len(
            check_entries_of_flags(
                parse_helm_flags(["-r", "simple_mcqa:model=facebook/opt-6.7b", "-m", "1"])
            )
        )
        == 1
    )


def test_a_shipped_file_is_found_from_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = read_conf(ROOT / "runs" / "quickstart.conf")
    for named in ("runs/quickstart.conf", "quickstart.conf"):
        given = parse_helm_flags(["-c", named, "-m", "1"])
        assert entries_of_flags(given) == shipped
        assert check_entries_of_flags(given) == [f"-c {named} is the shipped file"]
        (path,) = passed_to_helm(["-c", named, "-m", "1", "--suite", "s"], monkeypatch).conf_paths
        assert read_conf(Path(path)) == shipped
    with pytest.raises(UsageError, match=r"no such file; did you mean runs/quickstart\.conf"):
        conf_file(Path("runs") / "quickstrat.conf")
    with pytest.raises(UsageError, match=r"shipped are runs/accuracy\.conf, .* quickstart\.conf$"):
        conf_file(tmp_path / "elsewhere" / "zzz.conf")
    (tmp_path / "quickstart.conf").write_text("entries: []")
    assert conf_file(Path("quickstart.conf")) == Path("quickstart.conf")  # one's own goes first


def passed_to_helm(argv, monkeypatch):
    """Return the arguments that HELM gets from `flexgen-helm run`."""
    passed: list[Namespace] = []
    monkeypatch.setattr("helm.benchmark.run.helm_run", passed.append)
    assert suite.run_suite(argv).exit_code == 0
    return passed[0]


def test_an_entry_without_a_model_is_answered_with_one():
    for entry, separator in (("mmlu:subject=anatomy", ","), ("simple_mcqa", ":")):
        with pytest.raises(UsageError, match="names no model") as refused:
            check_entries([entry], [])
        advised = f"{entry}{separator}model=flexgen/smollm2-135m-instruct-q4_1"
        assert f"write {advised}, or" in str(refused.value)
        check_entries([advised], [])
    check_entries(["simple_mcqa"], [MODEL])
    # as HELM, which looks for one model in all of them
    check_entries(["simple_mcqa", f"gsm:model={MODEL}"], [])


def test_other_plugins_may_know_more(monkeypatch):
    entry = "theirs:model=opt-125m"
    check_entries([entry], [], has_plugins=True)
    with pytest.raises(UsageError, match="'theirs'"):
        check_entries([entry], [])
    monkeypatch.setattr(
        run_entries, "entry_points", lambda group: [SimpleNamespace(value="theirs.plugin")]
    )
    check_entries([entry], [])


def test_a_run_spec_of_this_process_is_known(monkeypatch):
    monkeypatch.setitem(helm_run_specs._REGISTERED_RUN_SPEC_FUNCTIONS, "made_here", lambda: None)
    check_entries([f"made_here:model={MODEL}"], [])


def test_the_users_deployments_are_theirs(tmp_path):
    ours = {"class_name": run_entries.CLIENT_CLASS}
    content = [
        {"name": "flexgen/mine", "client_spec": {**ours, "args": {"path": "opt-125m"}}},
        {"name": "lab/empty", "client_spec": {**ours, "args": {"path": str(tmp_path)}}},
        {
            "name": "flexgen/dummy",
            "client_spec": {**ours, "args": {"path": str(tmp_path), "weights": "dummy"}},
        },
        {"name": "flexgen/theirs", "client_spec": {"class_name": "x.Client"}},
        {"name": "lab/alias", "model_name": "flexgen/alias", "client_spec": ours},
        {"name": "flexgen/stale", "client_spec": ours},
    ]
    (tmp_path / "model_deployments.yaml").write_text(yaml.safe_dump({"model_deployments": content}))
    for name in ("mine", "dummy", "theirs", "alias"):
        check_entries([f"simple_mcqa:model=flexgen/{name}"], [], local_path=tmp_path)
        with pytest.raises(UnknownModelError):
            check_entries([f"simple_mcqa:model=flexgen/{name}"], [])
    check_entries(["simple_mcqa:model=lab/empty"], [], local_path=tmp_path, needs_weights=False)
    with pytest.raises(CheckpointError, match="has no weights"):
        check_entries(["simple_mcqa:model=lab/empty"], [], local_path=tmp_path)
    with pytest.raises(UnknownModelError):  # an earlier run wrote it; its name means nothing now
        check_entries(["simple_mcqa:model=flexgen/stale"], [], local_path=tmp_path)
    (tmp_path / "model_deployments.yaml").write_text("- [")
    check_entries([f"simple_mcqa:model={MODEL}"], [], local_path=tmp_path)


def test_a_folder_without_weights_is_refused_before_anything_is_imported(tiny, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    config = (tiny("llama").path / "config.json").read_text()
    (folder / "config.json").write_text(config)
    (tmp_path / "models.yaml").write_text(
        "mine: mine\ndummy: {path: mine, weights: dummy}\nwhole: " + str(tiny("llama").path)
    )
    code = (
        "import sys\nfrom flexgen_helm.errors import UsageError\nfrom flexgen_helm.run_entries "
        "import check_entries\n"
        "check_entries(['simple_mcqa:model=flexgen/whole', 'simple_mcqa:model=flexgen/dummy'], "
        "[])\n"
        "check_entries(['simple_mcqa:model=flexgen/mine'], [], needs_weights=False)\n"
        "try:\n    check_entries(['simple_mcqa:model=flexgen/mine'], [])\n"
        "except UsageError as error:\n    print(error)\n"
        "heavy = {'torch', 'transformers', 'helm', 'numpy', 'pandas'} & set(sys.modules)\nassert "
        "not heavy, heavy\n"
    )
    environment = {**os.environ, "FLEXGEN_HELM_MODELS": str(tmp_path / "models.yaml")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json"
    ]
    (folder / "pytorch_model.bin").write_bytes(b"x")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert f"`flexgen-helm convert {folder}`" in done.stdout


def pasted(message, folder, **variables):
    """Paste the lines of a message into a shell, and return what its name means to a new process in
    another folder.
    """
    lines = [line.strip() for line in message.splitlines()[1:]]
    name = message.splitlines()[0].rpartition("model=flexgen/")[2].removesuffix(":")
    look_up = (
        "from flexgen_helm.plugin.model_names import find_model as f; "
        f"print(f('flexgen/{name}').path)"
    )
    script = "set -e\n" + "\n".join([*lines, "cd /", f'{shlex.join(python("all"))} -c "{look_up}"'])
    environment = {
        key: value for key, value in os.environ.items() if key != "FLEXGEN_HELM_MODELS"
    } | variables
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.fast(2)
@pytest.mark.parametrize("name", ["it's: a #folder", "opt-125m"])
def test_the_lines_that_name_a_folder_work(tiny, tmp_path, monkeypatch, name):
    monkeypatch.delenv("FLEXGEN_HELM_MODELS", raising=False)
    folder = tmp_path / name
    folder.symlink_to(tiny("llama").path, target_is_directory=True)
    with pytest.raises(UsageError, match="paste these lines") as refused:
        check_entries([f"simple_mcqa:model=flexgen/{folder}"], [])
    assert pasted(str(refused.value), tmp_path) == str(folder)
    # The same name cannot be given twice: the file is there now, and the answer is the name.
    file = str(tmp_path / "models.yaml")
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", file)
    with pytest.raises(UsageError, match="write model=flexgen/") as refused:
        check_entries([f"simple_mcqa:model=flexgen/{folder}"], [])
    assert "\n" not in str(refused.value)
    assert pasted(str(refused.value), tmp_path, FLEXGEN_HELM_MODELS=file) == str(folder)
    with pytest.raises(UsageError) as refused:
        check_entries([f"simple_mcqa:model=flexgen/{tiny('llama').path}-4bit"], [])
    assert "-4bit:\n  echo " in str(refused.value) and "export" not in str(refused.value)
    assert pasted(str(refused.value), tmp_path, FLEXGEN_HELM_MODELS=file) == str(tiny("llama").path)


def test_a_model_of_helms_own_clients_is_hinted_at(tmp_path):
    entries = [
        "mmlu:model=facebook/opt-6.7b",
        "gsm:model=facebook/opt-6.7b",
        "gsm:model=openai/gpt2",
        "gsm",
    ]
    assert model_hints(entries, tmp_path) == [
        (
            "model=facebook/opt-6.7b is computed by HELM's own client; write "
            "model=flexgen/opt-6.7b for flexgen_helm"
        ),
        "model=openai/gpt2 is computed by HELM's own client",
    ]
    content = [
        {"name": name, "client_spec": {"class_name": run_entries.CLIENT_CLASS}}
        for name in ("lab/a", MODEL)
    ]
    (tmp_path / "model_deployments.yaml").write_text(yaml.safe_dump({"model_deployments": content}))
    assert model_hints([f"simple_mcqa:model={MODEL}", "gsm:model=lab/a"], tmp_path) == []
