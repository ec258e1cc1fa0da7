"""Published configurations with their own ids, vocabularies and stored parts: transformers'
numbers, or a refusal.
"""

import json
from dataclasses import replace

import pytest
import transformers

from flexgen_helm import Engine, MemoryLimits, Policy
from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.errors import UnsupportedArchitectureError
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.miniature import layer_kinds
from flexgen_helm.quant.formats import BlockFormat
from tests.helpers.published import (
    TOLERANCE,
    changed,
    compare,
    read,
    requests,
    rows,
    write,
)

ROWS = {row.repo: row for row in rows()}
RUN = [name for name, row in ROWS.items() if not row.refused]


@pytest.fixture(autouse=True)
def quiet():
    """Keep what transformers says of ids and of weights from the terminal."""
    level, has_bars = (
        transformers.logging.get_verbosity(),
        transformers.logging.is_progress_bar_enabled(),
    )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)
    if has_bars:
        transformers.logging.enable_progress_bar()


@pytest.mark.fast(6)
@pytest.mark.parametrize("name", RUN)
def test_it_equals_transformers(name, tmp_path):
    """Scores of prompts and greedy answers, which end at the published ids; alone, and with shared
    beginnings.
    """
    row = ROWS[name]
    model, content = write(row, tmp_path)
    assert not changed(row.config, content)
    asked = requests(row)
    with Engine.from_pretrained(tmp_path) as engine:
        assert engine.model_config.vocab_size == row.vocab_size and layer_kinds(
            engine.model_config
        ) == layer_kinds(read(content))
        results = engine.run(asked)
        engine.share_every_beginning()
        results += engine.run(asked)
        refused = [replace(asked[0], prompt_token_ids=[token]) for token in row.refused_ids]
        assert all(
            "stands for an image or a sound" in str(result.error) for result in engine.run(refused)
        )
    found = [compare(model, row, *pair) for pair in zip(2 * asked, results, strict=True)]
    assert max(difference for difference, _ in found) < TOLERANCE


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.refused])
def test_what_does_not_run_is_refused_by_name(name, tmp_path):
    row = ROWS[name]
    (tmp_path / "config.json").write_text(json.dumps(row.config))
    with pytest.raises((UnsupportedArchitectureError, ValueError, KeyError), match=row.refused):
        read(row.config)


def test_the_table_has_the_whole_catalog():
    """Each model, or one that differs in sizes alone; Kimi K2.5 is there for plans."""
    known = {repo for row in ROWS.values() for repo in (row.repo, *row.also)}
    assert [
        entry.name for entry in CATALOG.values() if (entry.hub_repo or entry.name) not in known
    ] == []
    refused = {name for name in ROWS if ROWS[name].refused}
    assert [entry.name for entry in CATALOG.values() if entry.hub_repo in refused] == ["kimi-k2.5"]
    assert len(ROWS) - len({entry.hub_repo for entry in CATALOG.values()} & {*ROWS}) >= 40


def test_classes_in_other_capitals_are_known():
    """The first Llamas have such a name, and Phi-3.5-MoE, which is in the table."""
    assert (
        architecture_of_config({"architectures": ["LLaMAForCausalLM"], "model_type": "llama"}).name
        == "llama"
    )


@pytest.mark.parametrize(
    "name",
    ["openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-30B-A3B-FP8", "zai-org/GLM-4.5"],
)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_experts_are_read_from_the_published_files(name, device, tmp_path):
    """All weights on the disk: no file of an expert is written, quantized or in 16 bits, whatever
    its projections.
    """
    row = ROWS[name]
    model, _ = write(row, tmp_path / "model")
    asked, policy = requests(row), Policy(4, 8, 0, 0, 1, 0, 1, 0)
    limits = MemoryLimits(gpu=64 << 20) if device == "sim" else MemoryLimits()
    with Engine.from_pretrained(
        tmp_path / "model",
        device=device,
        limits=limits,
        policy=policy,
        offload_dir=tmp_path / "offload",
    ) as engine:
        experts = [
            weight for tensor, weight in engine._weights.tensors.items() if ".experts.0." in tensor
        ]
        assert {isinstance(weight.fmt, BlockFormat) for weight in experts} == {
            name != "zai-org/GLM-4.5"
        }
        results = engine.run(asked)
    assert (
        max(compare(model, row, *pair)[0] for pair in zip(asked, results, strict=True)) < TOLERANCE
    )
    assert not [path for path in (tmp_path / "offload").rglob("*") if "experts" in path.name]
