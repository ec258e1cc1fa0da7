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
from helm.benchmark.model_deployment_registry import get_default_model_deployment_for_model, get_model_deployment
from helm.benchmark.model_metadata_registry import INSTRUCTION_FOLLOWING_MODEL_TAG, model_has_tag

import flexgen_helm.plugin  # noqa: F401
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import CheckpointError, UnknownModelError, UsageError
from flexgen_helm.plugin import deployment_files, registration
from flexgen_helm.plugin.context import PluginContext
from flexgen_helm.plugin.model_names import find_model
from flexgen_helm.request import MemoryLimits
from flexgen_helm.service.loaders import EngineLoader
from tests.helpers.forks import python
from tests.helpers.paths import ROOT

CLIENT = "flexgen_helm.plugin.client.FlexgenClient"


def test_two_runs_that_start_at_once_keep_each_others_entries(tmp_path, monkeypatch):
    write = deployment_files.replace_text

    def slow(path, text):
        time.sleep(0.01)
        write(path, text)

    monkeypatch.setattr(deployment_files, "replace_text", slow)
    path, names = tmp_path / "prod_env" / "model_deployments.yaml", [f"flexgen/m{i}" for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: deployment_files._merge_file(path, "model_deployments", [{"name": name}]), names))
    assert sorted(entry["name"] for entry in yaml.safe_load(path.read_text())["model_deployments"]) == names


def test_a_catalog_name():
    found = get_model_deployment("flexgen/opt-125m")
    assert (found.max_sequence_length, found.max_request_length) == (2048, 2049)
    assert found.model_name == found.tokenizer_name == "flexgen/opt-125m"
    assert get_model_deployment("flexgen/opt-125m") is found
    assert not model_has_tag("flexgen/opt-125m", INSTRUCTION_FOLLOWING_MODEL_TAG)
    get_model_deployment("flexgen/smollm2-135m-instruct-q4_1")
    assert model_has_tag("flexgen/smollm2-135m-instruct-q4_1", INSTRUCTION_FOLLOWING_MODEL_TAG)


@pytest.mark.parametrize(
    "name, path, precision",
    [
        ("flexgen/opt-125m", "opt-125m", "fp16"),
        ("flexgen/opt-125m-4bit", "opt-125m", "4bit"),
        ("flexgen/opt-125m-paper-4bit", "opt-125m", "paper-4bit"),
        ("flexgen/someone--some-model-4bit-s", "someone/some-model", "4bit-s"),
    ],
)
def test_what_a_name_means(name, path, precision):
    model = find_model(name)
    assert (model.path, model.config) == (path, EngineConfig(precision=precision))


@pytest.mark.parametrize("look_up", [get_model_deployment, get_default_model_deployment_for_model])
@pytest.mark.parametrize(
    "name, says", [("flexgen/opt-126m", "did you mean opt-125m"), ("flexgen/org/repo", "write 'flexgen/org--repo'")]
)
def test_an_unknown_name_reaches_the_user_as_a_sentence(look_up, name, says):
    with pytest.raises(UnknownModelError, match=says):
        look_up(name)


def test_names_of_the_users_own_file(tmp_path, monkeypatch):
    own = {
        "mine": {"path": "opt-125m", "schedule": "row", "limits": {"cpu": 5, "disk": "2GiB"}, "device": None},
        "other": "opt-350m",
    }
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(own))
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    mine = find_model("flexgen/mine-4bit")
    limits = MemoryLimits(cpu=5, disk=2 << 30)
    assert (mine.path, mine.config) == ("opt-125m", EngineConfig(precision="4bit", schedule="row", limits=limits))
    assert find_model("flexgen/other").path == "opt-350m"
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"mine": {"path": "opt-125m", "polcy": "row"}}))
    with pytest.raises(UsageError, match="unknown argument 'polcy'; known are path, revision, precision"):
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


def test_a_folder_without_weights_is_refused_when_its_name_is_looked_up(tiny, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    shutil.copy(tiny("llama").path / "config.json", tmp_path / "mine")
    own = {"empty": "mine", "made-up": {"path": "mine", "weights": "dummy"}, "whole": str(tiny("llama").path)}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(own))
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    with pytest.raises(CheckpointError, match="mine has no weights: neither model.safetensors nor"):
        get_model_deployment("flexgen/empty")
    assert get_model_deployment("flexgen/made-up").max_sequence_length
    assert get_model_deployment("flexgen/whole").max_sequence_length


def test_a_path_is_answered_with_lines_that_name_it(tiny):
    with pytest.raises(UnknownModelError, match="paste these lines, and write model=flexgen/.*\n  echo "):
        find_model(f"flexgen/{tiny('llama').path}")
    with pytest.raises(UnknownModelError, match="there is no model file or folder /no/where"):
        find_model("flexgen//no/where")


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(deployments, "ALL_MODEL_DEPLOYMENTS", list(deployments.ALL_MODEL_DEPLOYMENTS))
    known = dict(deployments.DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT)
    monkeypatch.setattr(deployments, "DEPLOYMENT_NAME_TO_MODEL_DEPLOYMENT", known)


def test_an_entry_of_helms_own_file_needs_only_name_and_path(clean_registry, tmp_path):
    entries = [
        {"name": "lab/mine", "client_spec": {"class_name": CLIENT, "args": {"path": "opt-125m", "device": "cpu"}}},
        {"name": "lab/gone", "client_spec": {"class_name": CLIENT, "args": {"path": "./nowhere"}}},
        {"name": "lab/foreign", "client_spec": {"class_name": "helm.clients.simple_client.SimpleClient"}},
        {"name": "lab/set", "client_spec": {"class_name": CLIENT, "args": {"path": "opt-350m"}},
         "max_sequence_length": 7},
    ]  # fmt: skip
    (tmp_path / "model_deployments.yaml").write_text(yaml.safe_dump({"model_deployments": entries}))
    register_configs_from_directory(str(tmp_path))
    registration.complete_file_deployments()
    mine = get_model_deployment("lab/mine")
    assert (mine.max_request_length, mine.tokenizer_name) == (2049, "flexgen/lab--mine")
    assert registration.model_of("lab/mine") == registration.model_of_tokenizer("flexgen/lab--mine")
    model = registration.model_of("lab/mine")
    assert model is not None and (model.path, model.config.device) == ("opt-125m", "cpu")
    assert get_model_deployment("lab/gone").max_sequence_length is None
    assert registration.model_of("lab/foreign") is None
    assert get_model_deployment("lab/set").max_sequence_length == 7


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
deployment_files.merge(Path("prod_env"), sys.argv[1:])
print(json.dumps([[get_model_deployment(name).max_request_length, get_tokenizer_config(name).end_of_text_token,
                   get_model_metadata(name).num_parameters] for name in sys.argv[1:]]))
"""


def test_entries_that_we_wrote_follow_the_name_and_a_users_own_stay(tiny, tmp_path, monkeypatch):
    """A name of the user's file comes to mean another model; each look is a process of HELM's, in the same folder."""
    first = tiny("llama").path
    second = shutil.copytree(first, tmp_path / "second")
    for name, changes in (("config.json", {"max_position_embeddings": 48, "num_hidden_layers": 2}),
                          ("tokenizer_config.json", {"eos_token": "<|pad|>"})):  # fmt: skip
        content = json.loads((first / name).read_text())
        (second / name).write_text(json.dumps({**content, **changes}))
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    theirs = (
        "# mine\nmodel_deployments:\n- name: flexgen/own # keep\n  client_spec:\n    class_name: " + CLIENT + "\n"
        "  max_sequence_length: 30\n"
    )
    file = tmp_path / "prod_env" / "model_deployments.yaml"
    file.parent.mkdir()
    file.write_text(theirs)

    def look(path):
        (tmp_path / "models.yaml").write_text(yaml.safe_dump({"m": str(path), "own": str(path)}))
        done = subprocess.run([*python("plan"), "-c", AFTER_FILES, "flexgen/m", "flexgen/own"], cwd=tmp_path,
                              capture_output=True, text=True, timeout=60)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert file.read_text().startswith(theirs)
        return json.loads(done.stdout.splitlines()[-1])

    (length, end, parameters), own = look(first)
    assert (length, end, own[:2]) == (97, "<|endoftext|>", [31, "<|endoftext|>"])
    written = {path.name: path.read_bytes() for path in file.parent.iterdir()}
    assert look(first)[0] == [length, end, parameters]
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == written
    (length, end, fewer), own = look(second)
    assert (length, end, own[:2]) == (49, "<|pad|>", [31, "<|pad|>"])
    assert fewer < parameters
    says = {path.name: yaml.safe_load(path.read_text()) for path in file.parent.iterdir()}
    assert [e["max_sequence_length"] for e in says["model_deployments.yaml"]["model_deployments"]] == [30, 48]
    assert [e["end_of_text_token"] for e in says["tokenizer_configs.yaml"]["tokenizer_configs"]] == ["<|pad|>"] * 2
    assert says["model_metadata.yaml"]["models"][0]["num_parameters"] == fewer
    # What the user completes by hand is the user's.
    changed = file.read_text().replace("max_request_length: 49", "max_request_length: 40")
    file.write_text(changed)
    assert look(first)[0][0] == 40
    assert file.read_text() == changed


@pytest.mark.parametrize("content", [b"- a\n", b"{", b"# caf\xe9\n"])
def test_a_file_that_helm_could_not_read_is_left_alone(tmp_path, content):
    path = tmp_path / "model_deployments.yaml"
    path.write_bytes(content)
    deployment_files._merge_file(path, "model_deployments", [{"name": "flexgen/x"}])
    assert path.read_bytes() == content


def test_notes_in_a_file_without_entries_stay(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("# my own notes\n")
    deployment_files._merge_file(path, "model_deployments", [{"name": "b"}])
    assert path.read_text().startswith("# my own notes\n")
    assert yaml.safe_load(path.read_text()) == {"model_deployments": [{"name": "b"}]}


def test_flow_style_is_merged_too(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("model_deployments: [{name: a}]\n")
    deployment_files._merge_file(path, "model_deployments", [{"name": "b"}])
    assert yaml.safe_load(path.read_text()) == {"model_deployments": [{"name": "a"}, {"name": "b"}]}


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
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True)
    brought = set(json.loads(done.stdout.splitlines()[-1]))
    assert not brought & {"torch", "transformers", "tokenizers", "numba", "scipy", "gguf", "safetensors"}
    assert "cannot register" not in done.stdout + done.stderr


def test_scenarios_are_refused_under_another_name():
    done = subprocess.run([sys.executable, "-c", "import scenarios"], cwd=ROOT, capture_output=True, text=True)
    assert "this package is flexgen_helm.scenarios" in done.stderr
