"""Published runs of MoE-Gen, vLLM and llama.cpp with mixtures on an A5000, and what is planned for that machine.

`python -m flexgen_helm.benchmarks.paper.moe_gen` prints tokens/s of prefill and of decoding: published, planned, and
the bound that no order of the work exceeds. No torch.
"""

from __future__ import annotations

import csv
import json
import tempfile
from pathlib import Path

from flexgen_helm.benchmarks.paper.tables import MACHINES
from flexgen_helm.checkpoint.names import read_model_config
from flexgen_helm.cli.console import print_table
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.planner.plan import Plan, make_plan, planning_problem
from flexgen_helm.planner.policy import Workload

# As the table names them: the catalog's name, and the precision that is closest in bytes.
_MODELS = {
    "deepseek-v3": ("deepseek-v3", "8bit"),
    "deepseek-v2": (None, "fp16"),
    "mixtral-8x22b": ("mixtral-8x22b-v0.1", "fp16"),
    "mixtral-8x7b": ("mixtral-8x7b-v0.1", "fp16"),
}
# Sizes of DeepSeek-V2, which the catalog lacks, as its publisher's config.json has them.
_DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 2,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}


def rows() -> list[dict[str, object]]:
    """Return the table's rows, each with the plan's tokens/s for its model, and their bounds."""
    with (Path(__file__).parent / "moe_gen.csv").open(encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    plans = {model: planned(model, published[0]) for model in _MODELS}
    return [
        {
            "model": row["model"],
            "system": row["system"],
            "prefill": float(row["prefill_tokens_s"]),
            "decode": float(row["decode_tokens_s"]),
            **_figures(plans[row["model"]]),
        }
        for row in published
    ]


def planned(model: str, row: dict[str, str]) -> Plan:
    """Return the plan of full blocks of a row's lengths on the table's machine."""
    name, precision = _MODELS[model]
    config, dtype = _config(name)
    lengths = Workload.uniform(int(row["prompt_len"]), int(row["gen_len"]), 1)
    machine = load_profile(str(MACHINES / "a5000.json"))
    return make_plan(planning_problem(config, machine, lengths, precision=precision, storage_dtype=dtype, endless=True))


def _config(name: str | None) -> tuple[ModelConfig, str]:
    if name is not None:
        return read_model_config(name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_DEEPSEEK_V2))
        return read_model_config(folder)


def _figures(plan: Plan) -> dict[str, object]:
    """Return tokens/s as planned, and if one reading a pass over the link, or the products alone, took all time."""
    problem, policy, prediction = plan.problem, plan.solution.policy, plan.solution.prediction
    config, sequences, workload = problem.config, policy.block_size, problem.workload
    assert problem.hardware.link is not None
    reading_s = (1 - policy.wg) * problem.stored_bytes / problem.hardware.link.to_gpu_bytes_s
    flops, rate = config.linear_flops_per_token, problem.product_flops.best
    tokens = {"prefill": sequences * workload.prompt, "decode": float(sequences)}
    seconds = {"prefill": prediction.prefill_s, "decode": prediction.decode_s / (workload.output - 1)}
    figures: dict[str, object] = {"block": sequences, "passes": prediction.passes}
    for phase, count in tokens.items():
        figures[f"planned {phase}"] = count / seconds[phase]
        figures[f"bound {phase}"] = count / max(reading_s, flops * count / rate)
    return figures


if __name__ == "__main__":
    print_table([{key: f"{v:,.3g}" if isinstance(v, float) else v for key, v in row.items()} for row in rows()])
