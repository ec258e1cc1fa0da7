"""Model names: what they mean, how many parameters they stand for, and how wrong ones are
refused.
"""

import json
from dataclasses import asdict
from math import ceil, prod

import pytest

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.names import planned_precision, quantized_by, resolve
from flexgen_helm.checkpoint.suffixes import split_precision
from flexgen_helm.errors import UnknownModelError, UsageError
from flexgen_helm.models.config import EMBED, HEAD, expert_of, stage_names
from flexgen_helm.planner.storage_sizes import StorageSizes
from tests.helpers.catalog_configs import trace, traced_entries

# Published sizes; exact where the hub's model page or `transformers` counts them.
# Published sizes; exact where the hub's model page or `transformers` counts them.
PUBLISHED = """
opt-125m                    125_239_296
opt-350m                    331_196_416
opt-30b                  29_974_540_288
smollm2-135m                134_515_008
llama-2-70b              68_976_648_192
llama-3-8b                8_030_261_248
llama-3.2-1b              1_235_814_400
qwen3-0.6b                  596_049_920
mistral-7b-v0.3           7_248_023_552
gemma-2-9b                9_241_705_984
gemma-3-1b-pt               999_885_952
pythia-1b                 1_011_781_632
gpt2                        124_439_808
bloom-560m                  559_214_592
phi-3-mini-4k-instruct    3_821_079_552
phi-4                    14_659_507_200
mixtral-8x7b-v0.1        46_702_792_704
qwen3-30b-a3b            30_532_122_624
llama-3.1-405b          405_853_388_800
qwen2.5-7b                7_615_616_512
mistral-nemo-instruct-2407  12_247_782_400
olmo-2-0425-1b            1_484_916_736
gpt-oss-20b              20_914_757_184
deepseek-v2-lite         15_706_484_224
smollm3-3b                3_075_098_624
olmo-3-1025-7b            7_298_011_136
"""
# Billions as announced in the models' own cards and reports: of all parameters, without layers that
# only guess further tokens, and of those that a token uses ('-': not announced), with or without
# the embedding. Of Kimi K2, ERNIE and MiniMax as llama.cpp counts the tensors: 'model params =
# 1.027 T', '21.83 B', '228.69 B'. Gemma 3n is announced with the encoders of images and sounds,
# 0.30 and 0.68 billion.
ANNOUNCED = """
opt-66b                          65.7    -
opt-175b                        175      -
galactica-125m                    0.125  -
galactica-1.3b                    1.3    -
galactica-6.7b                    6.66   -
galactica-30b                    30      -
galactica-120b                  121      -
olmo-2-1124-7b                    7.3    -
olmo-3-1125-32b                  32.2    -
granite-3.3-8b-instruct           8.17   -
mixtral-8x22b-v0.1                -     39
gpt-oss-20b                       -      3.6
gpt-oss-120b                      -      5.1
llama-4-scout-instruct          109     17
llama-4-maverick-instruct       400     17
deepseek-v3                     671     37
deepseek-v3.2                   671     37
glm-4.5                         355     32
glm-4.5-air                     106     12
glm-4.7                         355     32
glm-5                           744      -
glm-5.1                         744      -
glm-5.2                         744     40
kimi-k2-instruct               1027     32
kimi-k2.5                      1027     32
kimi-linear-48b-a3b-instruct     49.1    -
ernie-4.5-21b-a3b                21.83   -
minimax-m2                      228.69  10
minimax-m2.1                    228.69   -
minimax-m2.5                    228.69   -
minimax-m2.7                    228.69   -
qwen3-30b-a3b                     -      3.3
qwen3-235b-a22b                   -     22
qwen3-coder-480b-a35b-instruct  480     35
qwen3-next-80b-a3b-instruct      80      -
qwen3.5-9b                        9      -
qwen3.5-27b                      27      -
qwen3.5-35b-a3b                  35      -
qwen3.5-122b-a10b               122      -
qwen3.5-397b-a17b               397     17
nemotron-h-56b-base              56      -
nemotron-3-nano-30b-a3b          31.6    3.2
nemotron-3-ultra-550b-a55b      550     55
ling-3.0-flash                  124      5.1
seed-oss-36b-instruct            36      -
jamba-v0.1                       52     12
gemma-3n-e2b                      4.46   -
gemma-3n-e4b                      6.87   -
"""


def rows(table):
    return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize("name, number", rows(PUBLISHED))
def test_number_of_parameters_is_the_published_one(name, number):
    assert CATALOG[name].config.num_parameters == int(number)


@pytest.mark.parametrize("name, billions, used", rows(ANNOUNCED))
def test_number_of_parameters_is_near_the_announced_one(name, billions, used):
    config = CATALOG[name].config
    if billions != "-":
        assert config.num_parameters == pytest.approx(float(billions) * 1e9, rel=0.013)
    if used != "-":
        products = (config.linear_flops_per_token + config.head_flops_per_token) / 2
        assert products == pytest.approx(float(used) * 1e9, rel=0.1)


def bytes_at_rest(name):
    """Bytes of the published files, from the types of the entry: of their codes, and of their
    scales.
    """
    entry = CATALOG[name]
    stored = entry.published.get("quantization_config", {"quant_method": None})
    method, kept = stored["quant_method"], 0.0
    for stage in stage_names(entry.config):
        for tensor, shape in entry.config.stage_tensors(stage):
            num_bytes = 2.0 * prod(shape)
            is_matrix = len(shape) > 1 and stage not in (EMBED, HEAD)
            if method == "fp8" and is_matrix and not tensor.endswith(".gate.weight"):
                rows, columns = stored["weight_block_size"]
                num_bytes = prod(shape) + 4.0 * ceil(shape[0] / rows) * ceil(shape[1] / columns)
            elif (
                method in ("mxfp4", "compressed-tensors")
                and expert_of(tensor) is not None
                and is_matrix
            ):
                scale_bytes = {"mxfp4": 1, "compressed-tensors": 2}[method]
                num_bytes = prod(shape) / 2 + prod(shape) / 32 * scale_bytes
            kept += num_bytes
    return kept


def test_bytes_at_rest_are_those_of_the_published_files():
    # 1.5 TB as published in 16 bits (Unsloth's page of its files); 958.52 GiB and 594 GB on the hub
    # by Simon Willison's storage calculator, the second of Kimi K2 Thinking, which has the types of
    # K2.5; 60.8 GiB in the model card of gpt-oss; 215 GiB as the card of a merge of MiniMax M2 says
    # of its files.
    gib = {"kimi-k2-instruct": 958.52, "gpt-oss-120b": 60.8, "minimax-m2": 215}
    published = {"glm-5.2": 1.5e12, "kimi-k2.5": 594e9} | {
        name: 2**30 * number for name, number in gib.items()
    }
    for name, num_bytes in published.items():
        assert bytes_at_rest(name) == pytest.approx(num_bytes, rel=0.01), name
    # All files of DeepSeek V3 have 688,586,727,753 bytes, with one layer more that guesses tokens:
    # it has its own embedding and head, and a matrix that joins two hidden states.
    config = CATALOG["deepseek-v3"].config
    (*_, last) = (stage for stage in stage_names(config) if stage not in (EMBED, HEAD))
    more = sum(prod(shape) for _, shape in config.stage_tensors(last)) + 2 * config.hidden_size**2
    more += 2 * 2 * config.vocab_size * config.hidden_size
    assert bytes_at_rest("deepseek-v3") + more == pytest.approx(688_586_727_753, rel=0.003)


def test_plans_of_kimi_count_experts_in_4_bits_and_what_is_ignored_in_16():
    sizes = StorageSizes(
        CATALOG["kimi-k2.5"].config, planned_precision("kimi-k2.5", "fp16")
    ).matrices
    # without routers
    assert sum(sizes.values()) == pytest.approx(bytes_at_rest("kimi-k2.5"), rel=3e-3)


def test_what_is_published_quantized_says_so():
    methods = {
        "kimi-k2.5": "compressed-tensors",
        "gpt-oss-20b": "mxfp4",
        "deepseek-v3.2": "fp8",
        "minimax-m2.7": "fp8",
    }
    methods |= {"glm-5.2": None, "opt-125m": None}
    assert {name: quantized_by(name) for name in methods} == methods
    # A record of a model is the same however its weights are stored.
    assert all("quantization" not in json.dumps(asdict(entry.config)) for entry in traced_entries())


def test_records_of_transformers_classes_are_what_their_modules_say():
    """For one here, for all in the slow suite; `make catalog` writes them anew."""
    entry = CATALOG["gpt-oss-20b"]
    assert trace(entry) == json.loads(json.dumps(asdict(entry.config)))


@pytest.mark.slow
def test_all_records_of_transformers_classes_are_what_their_modules_say():
    assert len(traced_entries()) > 10
    for entry in traced_entries():
        assert trace(entry) == json.loads(json.dumps(asdict(entry.config))), entry.name


@pytest.mark.parametrize(
    "name, facts",
    [
        ("opt-350m", {"embed_size": 512, "residual": "post_norm", "final_norm": False}),
        ("galactica-30b", {"activation": "gelu", "qkv_bias": False, "norm_affine": False}),
        ("galactica-6.7b", {"mlp_bias": True}),
        ("llama-3.1-8b", {"max_positions": 131072, "tied_head": False}),
        ("llama-3.2-1b", {"tied_head": True}),
    ],
)
def test_architectures_that_differ_from_their_siblings(name, facts):
    config = CATALOG[name].config
    assert {fact: getattr(config, fact) for fact in facts} == facts
    rope = CATALOG["llama-3.2-3b"].config.rope
    assert (rope.kind, rope.factor, rope.theta) == ("llama3", 32.0, 500_000.0)


@pytest.mark.parametrize(
    "name", [name for name in CATALOG if not name.startswith("smollm2-135m-instruct-q4")]
)
def test_every_catalog_name_resolves_to_itself(name):
    found = resolve(f"flexgen/{name}-4bit")
    kind = "unpublished" if name == "opt-175b" else "hub"
    assert (found.name, found.precision, found.entry, found.kind) == (
        name,
        "4bit",
        CATALOG[name],
        kind,
    )


@pytest.mark.parametrize("base", ["opt-125m", "org--repo", "a-4bit-model"])
def test_longest_precision_suffix_wins(base):
    for precision in ("4bit", "4bit-s", "fp16-s", "paper-4bit"):
        assert split_precision(f"{base}-{precision}") == (base, precision)
    assert split_precision(base) == (base, "fp16")


@pytest.mark.parametrize(
    "text", ["facebook/opt-125m", "flexgen/facebook--opt-125m", "facebook--opt-125m-paper-4bit"]
)
def test_both_spellings_of_a_hub_name(text):
    found = resolve(text, revision="abc")
    assert (found.name, found.kind, found.revision) == ("facebook--opt-125m", "hub", "abc")
    assert found.hub_repo == "facebook/opt-125m" and found.entry is CATALOG["opt-125m"]


def test_local_paths_win_over_suffixes_and_hub_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model-4bit").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"")
    found = resolve("org/model-4bit")
    assert (found.kind, found.precision, found.name) == ("folder", "fp16", "model-4bit")
    assert resolve("org/model-4bit-4bit-s").precision == "4bit-s"
    assert resolve(tmp_path / "m.gguf").kind == "gguf"
    assert resolve("./m.gguf-4bit").precision == "4bit"


@pytest.fixture
def models_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXGEN_HELM_MODELS", str(tmp_path / "models.yaml"))
    return tmp_path / "models.yaml"


def test_models_file_of_the_user(models_file):
    weights = models_file.with_name("weights")
    weights.mkdir()
    models_file.write_text(
        "mine: weights\n"
        "tuned-4bit: {path: weights, revision: r1, policy: auto}\n"
        "opt-125m: {limits: {cpu: 1GiB}}\n"
        "lost: nowhere\n"
        "odd: {limits: 3}\n"
    )
    assert resolve("flexgen/mine-4bit").path == weights
    tuned, known = resolve("tuned-4bit"), resolve("opt-125m")
    assert (tuned.name, tuned.precision, dict(tuned.arguments)) == (
        "tuned-4bit",
        "fp16",
        {"policy": "auto"},
    )
    assert (known.arguments, known.hub_repo) == ({"limits": {"cpu": "1GiB"}}, "facebook/opt-125m")
    for name, message in (("lost", "lost.*nowhere"), ("odd", "odd.*needs a path")):
        with pytest.raises(UnknownModelError, match=message):
            resolve(name)


@pytest.mark.parametrize("content", ["[1, 2]", "a: 3", "a: {path: 3}", "{", "a: [b]"])
def test_unusable_models_file_is_a_usage_error(models_file, content):
    models_file.write_text(content)
    with pytest.raises(UsageError, match=r"models\.yaml"):
        resolve("opt-125m")


@pytest.mark.parametrize(
    "name, message",
    [
        ("flexgen/opt-1.3-4bit", "did you mean opt-1.3b-4bit, .*flexgen-helm models"),
        ("flexgen/zzzz", "hub repository.*config.json.*gguf.*FLEXGEN_HELM_MODELS.*helm models"),
        ("./absent.gguf", "no model file or folder"),
        ("", None),
    ],
)
def test_unknown_names_list_the_closest_and_the_ways(name, message):
    with pytest.raises(UnknownModelError, match=message):
        resolve(name)
