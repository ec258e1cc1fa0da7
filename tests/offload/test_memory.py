"""Memory measured from outside: a model three times the limit stays below what is promised, a layer
beyond it runs.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits, Policy
from tests.helpers.forks import python
from tests.helpers.parity import assert_same
from tests.helpers.paths import ROOT

MIB = 1 << 20
LIMIT = 60 * MIB
# 10 layers of 18.9 MB and a table of 6 MB in 16 bits: more than three times the limit.
LARGE = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=10, num_attention_heads=12)
# In memory as stored, which not every processor multiplies, it exceeds the bound by itself.
LARGER = {**LARGE, "num_hidden_layers": 20}
TRIVIAL = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)

# Prints the process's peak after each engine; VmHWM, for ru_maxrss remembers the process that
# started this one.
SCRIPT = """
import json, sys
from flexgen_helm import Engine, GenerationRequest, MemoryLimits

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

folder, runs = sys.argv[1], json.loads(sys.argv[2])
peaks = []
for model, limit, schedule, prompt, rows in runs:
    with Engine.from_pretrained(model, weights="dummy", offload_dir=folder, schedule=schedule,
                                limits=MemoryLimits(cpu=limit)) as engine:
        new = 1 if schedule == "prefill-only" else 2
        requests = [
            GenerationRequest(prompt_token_ids=[5 + i % 900] * prompt, max_tokens=new, ignore_eos=True)
            for i in range(rows)
        ]
        results = engine.run(requests)
        assert all(result.error is None for result in results), results[0].error
        peaks.append([peak(), engine.last_run["peak_workspace_bytes"], engine.last_run["peak_bytes"]])
print(json.dumps(peaks))
"""


def model_folder(folder, **sizes):
    """A folder with sizes only, for dummy weights."""
    folder.mkdir(exist_ok=True)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=4000,
        max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu",
        tie_word_embeddings=True, torch_dtype="float16",
        num_key_value_heads=sizes["num_attention_heads"], bos_token_id=1, eos_token_id=2, **sizes,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measured(folder, *runs):
    """[peak resident bytes of the process so far, reported workspace, peak bytes by tier] of each
    run, in turn.
    """
    done = subprocess.run(
        [*python("all"), "-c", SCRIPT, str(folder / "offload"), json.dumps(runs)], capture_output=True, text=True,
        timeout=120, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_model_three_times_the_limit_stays_below_it(tmp_path, record_property):
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak is read from Linux's /proc")
    large, trivial = (
        model_folder(tmp_path / "large", **LARGE),
        model_folder(tmp_path / "trivial", **TRIVIAL),
    )
    larger = model_folder(tmp_path / "larger", **LARGER)
    ((empty, _, _),) = measured(tmp_path, (str(trivial), LIMIT, "auto", 20, 8))
    # Generating first, then a data set whose states exceed memory; at last all in memory: the
    # guard's inverse. What a process had before its engine is not the engine's, so each has its
    # own.
    (zigzag,) = measured(tmp_path, (str(large), LIMIT, "zigzag", 20, 8))
    scoring, resident = measured(
        tmp_path,
        (str(large), LIMIT, "prefill-only", 56, 40),
        (str(larger), 2000 * MIB, "row", 2, 1),
    )
    for name, (peak, workspace, tiers) in (("zigzag", zigzag), ("prefill-only", scoring)):
        bound = LIMIT + empty + workspace + 32 * MIB
        record_property(name, f"{peak / MIB:.0f} of {bound / MIB:.0f} MiB")
        print(f"{name}: peak {peak / MIB:.0f} MiB, bound {bound / MIB:.0f}, empty "
              f"{empty / MIB:.0f}, workspace {workspace / MIB:.0f}, ledger "
              f"{tiers['cpu'] / MIB:.0f}")  # fmt: skip
        assert tiers["cpu"] <= LIMIT and tiers["disk"] > 2 * LIMIT
        assert peak < bound < resident[0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_larger_than_the_limit_runs(tmp_path, overlap):
    """One layer has 14.7 MB, the whole tier 9: matrices arrive in tiles, and no stage is ever
    whole.
    """
    wide = dict(hidden_size=512, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8)
    model = model_folder(tmp_path / "wide", **wide)
    requests = [
        GenerationRequest(
            prompt_token_ids=[7 + i, 9, 11 * i], max_tokens=4, echo_logprobs=True, ignore_eos=True
        )
        for i in range(5)
    ]
    with Engine.from_pretrained(model, weights="dummy") as engine:
        expected = engine.run(requests)
    limits, policy = MemoryLimits(cpu=9 * MIB, disk=256 * MIB), Policy(3, 2, wc=0.0)
    options = dict(
        weights="dummy",
        limits=limits,
        policy=policy,
        offload_dir=tmp_path / "offload",
        overlap=overlap,
    )
    with Engine.from_pretrained(model, schedule="zigzag", **options) as engine:
        layer = 2 * (4 * 512**2 + 3 * 512 * 4096)
        assert layer > limits.cpu
        results = engine.run(requests)
        assert engine.last_run["peak_bytes"]["cpu"] <= limits.cpu
        # Loaded again for each of two batches, because 5 sequences run in threes.
        assert engine.last_run["bytes"]["disk_to_cpu"]["weights"] >= 4 * 2 * 2 * layer
    assert_same(results, expected)
