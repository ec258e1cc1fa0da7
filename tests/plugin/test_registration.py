"""Names, deployments, files that other HELM commands read, and what an import brings."""

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import helm.benchmark.run  # noqa: F401  (names are looked up as where scenarios run)
import pytest
import yaml
from helm.benchmark import model_deployment_registry as deployments
from helm.benchmark.config_registry import register_configs_from_directory
from helm.benchmark.model_deployment_registry import (
    get_default_model_deployment_for_model,
    get_model_deployment,
)
from helm.benchmark.model_metadata_registry import INSTRUCTION_FOLLOWING_MODEL_TAG, model_has_tag

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import CheckpointError, UnknownModelError, UsageError
from flexgen_helm.plugin import deployment_files, registration
from flexgen_helm.plugin.context import PluginContext
from flexgen_helm.plugin.model_names import find_model
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.tiers import MemoryLimits
from tests.helpers.forks import python
from tests.helpers.model_folders import edit_config
from tests.helpers.paths import ROOT

CLIENT = "flexgen_helm.plugin.client.FlexgenClient"


def test_two_runs_that_start_at_once_keep_each_others_entries(
    tiny, tmp_path, monkeypatch, own_models
):
    write, names = deployment_files.replace_text, [f"m{i}" for i in range(5)]
    own_models(**dict.fromkeys(names, str(tiny("llama").path)))
    monkeypatch.setattr(
        deployment_files, "replace_text", lambda *given: (time.sleep(0.01), write(*given))
    )
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda name: deployment_files.add_entries(tmp_path, [f"flexgen/{name}"]), names
            )
        )
    written = yaml.safe_load((tmp_path / "model_deployments.yaml").read_text())["model_deployments"]
    assert sorted(entry["name"] for entry in written) == [f"flexgen/{name}" for name in names]


def test_a_catalog_name():
    found = get_model_deployment("flexgen/opt-125m")
    assert (found.max_sequence_length, found.max_request_length) == (2048, 2049)
    assert found.model_name == found.tokenizer_name == "flexgen/opt-125m"
    assert get_model_deployment("flexgen/opt-125m") is found
    for name, is_instruct in (
        ("flexgen/opt-125m", False),
        ("flexgen/smollm2-135m-instruct-q4_1", True),
    ):
        get_model_deployment(name)
        assert model_has_tag(name, INSTRUCTION_FOLLOWING_MODEL_TAG) == is_instruct


@pytest.mark.parametrize(
    "name, path, precision",
    [
        ("opt-125m", "opt-125m", "fp16"),
        ("opt-125m-paper-4bit", "opt-125m", "paper-4bit"),
        ("someone--some-model-4bit-s", "someone/some-model", "4bit-s"),
    ],
)
def test_what_a_name_means(name, path, precision):
    model = find_model(f"flexgen/{name}")
    assert (model.path, model.config) == (path, EngineConfig(precision=precision))


@pytest.mark.parametrize("look_up", [get_model_deployment, get_default_model_deployment_for_model])
@pytest.mark.parametrize(
    "name, says",
    [
        ("flexgen/opt-126m", "did you mean opt-125m"),
        ("flexgen/org/repo", "write 'flexgen/org--repo'"),
    ],
)
def test_an_unknown_name_reaches_the_user_as_a_sentence(look_up, name, says):
    with pytest.raises(UnknownModelError, match=says):
        look_up(name)


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """own_models(name=…) writes the user's file."""
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    return lambda **models: (tmp_path / "models.yaml").write_text(yaml.safe_dump(models))


def test_names_of_the_users_own_file(own_models):
    limits = {"cpu": 5, "disk": "2GiB"}
    own_models(
        mine={"path": "opt-125m", "schedule": "row", "limits": limits, "device": None},
        other="opt-350m",
    )
    mine, limits = find_model("flexgen/mine-4bit"), MemoryLimits(cpu=5, disk=2 << 30)
    assert (mine.path, mine.config) == (
        "opt-125m",
        EngineConfig(precision="4bit", schedule="row", limits=limits),
    )
    assert find_model("flexgen/other").path == "opt-350m"
    own_models(mine={"path": "opt-125m", "polcy": "row"})
    with pytest.raises(
        UsageError, match=("unknown argument 'polcy'; known are path, revision, precision")
    ):
        find_model("flexgen/mine")


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"limits": {"cpu": "much"}}, "the limit of the cpu tier, 'much', is no size"),
        ({"schedule": "spiral"}, "schedule 'spiral' is not known; take auto, row"),
        ({"overlap": "yes"}, "overlap 'yes' must be true or false"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_when_the_model_is_loaded(arguments, says):
    model = find_model("flexgen/opt-125m", arguments)
    assert hash(model)
    with pytest.raises(UsageError, match=says):
        EngineLoader().load(model)


def test_flags_of_the_command_line_go_first():
    context = PluginContext()
    assert context.find_model("flexgen/opt-125m", {"device": "cuda"}).config.device == "cuda"
    context.engine_options = {"device": "cpu"}
    assert context.find_model("flexgen/opt-125m", {"device": "cuda"}).config.device == "cpu"


def test_a_folder_without_weights_is_refused_when_its_name_is_looked_up(tiny, tmp_path, own_models):
    (tmp_path / "mine").mkdir()
    shutil.copy(tiny("llama").path / "config.json", tmp_path / "mine")
    own_models(
        empty="mine", made_up={"path": "mine", "weights": "dummy"}, whole=str(tiny("llama").path)
    )
    with pytest.raises(CheckpointError, match="mine has no weights: neither model.safetensors nor"):
        get_model_deployment("flexgen/empty")
    for name in ("made_up", "whole"):
        assert get_model_deployment(f"flexgen/{name}").max_sequence_length


def test_a_path_is_answered_with_lines_that_name_it(tiny):
    with pytest.raises(
        UnknownModelError, match=("paste these lines, and write model=flexgen/.*\n  echo ")
    ):
        find_model(f"flexgen/{tiny('llama').path}")
    with pytest.raises(UnknownModelError, match="there is no model file or folder /no/where"):
        find_model("flexgen//no/where")


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(
        deployments, "ALL_MODEL_DEPLOYMENTS", list(deployments.ALL_MODEL_DEPLOYMENTS)
    )
    known = dict(deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT)
    monkeypatch.setattr(deployments, "DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT", known)


def test_an_entry_of_helms_own_file_needs_only_name_and_path(clean_registry, tmp_path):
    def entry(name, class_name=CLIENT, more=(), **args):
        return {
            "name": f"lab/{name}",
            "client_spec": {"class_name": class_name, "args": args},
            **dict(more),
        }

    entries = [
        entry("mine", path="opt-125m", device="cpu"),
        entry("gone", path="./nowhere"),
        entry("foreign", "helm.clients.simple_client.SimpleClient"),
        entry("set", more={"max_sequence_length": 7}, path="opt-350m"),
    ]
    (tmp_path / "model_deployments.yaml").write_text(yaml.safe_dump({"model_deployments": entries}))
    register_configs_from_directory(str(tmp_path))
    registration.complete_file_deployments()
    mine, model = get_model_deployment("lab/mine"), registration.model_of("lab/mine")
    assert (mine.max_request_length, mine.tokenizer_name) == (2049, "flexgen/lab--mine")
    assert (model.path, model.config.device) == ("opt-125m", "cpu")
    assert model == registration.model_of_tokenizer("flexgen/lab--mine")
    assert registration.model_of("lab/foreign") is None
    lengths = [get_model_deployment(f"lab/{name}").max_sequence_length for name in ("gone", "set")]
    assert lengths == [None, 7]


AFTER_FILES = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from helm.benchmark.config_registry import register_configs_from_directory
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.model_metadata_registry import get_model_metadata
from helm.benchmark.run import load_entry_point_plugins
from helm.benchmark.tokenizer_config_registry import get_tokenizer_config
register_configs_from_directory("prod_env")
load_entry_point_plugins()
from flexgen_helm.plugin import deployment_files
deployment_files.add_entries(Path("prod_env"), sys.argv[1:])
print(json.dumps([[get_model_deployment(name).max_request_length, get_tokenizer_config(name).end_of_text_token,
                   get_model_metadata(name).num_parameters] for name in sys.argv[1:]]))
"""


def test_entries_that_we_wrote_follow_the_name_and_a_users_own_stay(tiny, tmp_path, own_models):
    """A name of the user's file comes to mean another model; each look is a process of HELM's, in
    the same folder.
    """
    first = tiny("llama").path
    second = shutil.copytree(first, tmp_path / "second")
    edit_config(second, max_position_embeddings=48, num_hidden_layers=2)
    tokenizer = json.loads((first / "tokenizer_config.json").read_text())
    (second / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": "<|pad|>"}))
    theirs = (
        "# mine\nmodel_deployments:\n- name: flexgen/own # keep\n  client_spec:\n  "
        "  class_name: " + CLIENT + "\n"
        "  max_sequence_length: 30\n"
    )
    file = tmp_path / "prod_env" / "model_deployments.yaml"
    file.parent.mkdir()
    file.write_text(theirs)

    def files():
        return {path.name: path.read_text() for path in file.parent.iterdir()}

    def look(path):
        own_models(m=str(path), own=str(path))
        command = [*python("plan"), "-c", AFTER_FILES, "flexgen/m", "flexgen/own"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert file.read_text().startswith(theirs)
        (length, end, parameters), own = json.loads(done.stdout.splitlines()[-1])
        assert own[:2] == [31, end]
        return length, end, parameters

    (length, end, parameters) = look(first)
    assert (length, end) == (97, "<|endoftext|>")
    written = files()
    assert look(first) == (length, end, parameters) and files() == written
    length, end, fewer = look(second)
    assert (length, end) == (49, "<|pad|>") and fewer < parameters
    says = {name: yaml.safe_load(text) for name, text in files().items()}
    assert [
        e["max_sequence_length"] for e in says["model_deployments.yaml"]["model_deployments"]
    ] == [30, 48]
    assert [
        e["end_of_text_token"] for e in says["tokenizer_configs.yaml"]["tokenizer_configs"]
    ] == ["<|pad|>"] * 2
    assert says["model_metadata.yaml"]["models"][0]["num_parameters"] == fewer
    # What the user completes by hand is the user's.
    changed = file.read_text().replace("max_request_length: 49", "max_request_length: 40")
    file.write_text(changed)
    assert look(first)[0] == 40
    assert file.read_text() == changed


@pytest.mark.parametrize(
    "content, begins, names",
    [
        (b"- a\n", b"- a\n", None),  # HELM could not read these three, which are left alone
        (b"{", b"{", None),
        (b"# caf\xe9\n", b"# caf\xe9\n", None),
        (b"# my own notes\n", b"# my own notes\n", ["flexgen/own"]),
        (b"model_deployments: [{name: a}]\n", b"", ["a", "flexgen/own"]),
    ],
)
def test_a_users_file_keeps_what_it_has(tiny, tmp_path, own_models, content, begins, names):
    own_models(own=str(tiny("llama").path))
    path = tmp_path / "model_deployments.yaml"
    path.write_bytes(content)
    deployment_files.add_entries(tmp_path, ["flexgen/own"])
    assert path.read_bytes().startswith(begins)
    if names is None:
        assert path.read_bytes() == content
    else:
        assert [
            entry["name"] for entry in yaml.safe_load(path.read_text())["model_deployments"]
        ] == names


IMPORTS = """
import json, sys
import helm.benchmark.run
before = set(sys.modules)
import flexgen_helm.plugin
from helm.benchmark.model_deployment_registry import get_model_deployment
get_model_deployment("flexgen/opt-125m-4bit")
sys.modules.pop("flexgen_helm.plugin")
import flexgen_helm.plugin  # a second import registers nothing a second time
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""


def test_registration_is_light_and_can_be_repeated():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True
    )
    brought = set(json.loads(done.stdout.splitlines()[-1]))
    assert not brought & {
        "torch",
        "transformers",
        "tokenizers",
        "numba",
        "scipy",
        "gguf",
        "safetensors",
    }
    assert "cannot register" not in done.stdout + done.stderr


def test_scenarios_are_refused_under_another_name():
    done = subprocess.run(
        [sys.executable, "-c", "import scenarios"], cwd=ROOT, capture_output=True, text=True
    )
    assert "this package is flexgen_helm.scenarios" in done.stderr
