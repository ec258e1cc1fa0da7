"""`bench network`: a pipeline over slow links against offloading on one device (the paper's comparison with Petals).

The first part is the cost model's: OPT-30B, prompts of 512 tokens, over four T4s that hold all of it, as the paper used
Petals (six clients with two sequences each, which send hidden states to each node and get them back), and offloaded on
one T4. Latency is that of twelve sequences on both sides; throughput is that of Petals' load, for each GPU, and that of
offloading's best block.

The second part measures the network term with real processes: two ranks of a pipeline in network namespaces of their
own, over a link of the given delay and rate (`slow_link`). Where that is not allowed, a note says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexgen_helm.benchmarks import Options, summary
from flexgen_helm.benchmarks.common import log_tail, machine, refuse_engine_flags
from flexgen_helm.benchmarks.network_model import Network, pipeline_turns
from flexgen_helm.benchmarks.paper.systems import SYSTEMS
from flexgen_helm.benchmarks.slow_link import namespaces, why_not
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import FlexgenError, MemoryLimitError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.placement import TIERS
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.schedules import ZIGZAG
from flexgen_helm.planner.search import search
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import FP16
from flexgen_helm.report.throughput import versions

MBIT = 1e6 / 8
NETWORKS: Mapping[str, Network] = {
    "10 ms, 1 Gbit/s": Network(0.01, 1000 * MBIT),
    "10 ms, 100 Mbit/s": Network(0.01, 100 * MBIT),
    "100 ms, 100 Mbit/s": Network(0.1, 100 * MBIT),
}
OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
PROMPT = 512
# The paper's Petals: nodes, parallel clients on one machine, and sequences of a client's request.
NODES, CLIENTS, CLIENT_SEQUENCES = 4, 6, 2
# The measured part: tokens that each of the requests draws, and the requests.
MEASURED_OUTPUTS, MEASURED_REQUESTS, MEASURED_PROMPT = (2, 16), 4, 64
# Delays of the network that a message takes: the sender waits until the receiver has said that it is ready.
GLOO_DELAYS = 2


def run(options: Options) -> dict[str, Any]:
    """Run the benchmark. Rows of the model are in seconds and tokens per second of one GPU; the others in seconds."""
    refuse_engine_flags("network", options)
    rows, crossings = predicted_rows()
    measured, note = measured_rows(options)
    return {
        "name": "network",
        "hardware": machine(),
        "versions": versions(),
        "workload": {"model": "opt-30b", "prompt_len": PROMPT, "sequences": CLIENTS * CLIENT_SEQUENCES},
        "rows": rows + measured,
        "ratios": {},
        "notes": [*crossings, "latency of 12 sequences, throughput of one GPU; the model's, for T4s", *note],
    }


def predicted_rows() -> tuple[list[dict[str, Any]], list[str]]:
    """Return latency and throughput by network and output length, and where the latencies cross."""
    rows: list[dict[str, Any]] = []
    crossings = []
    offloaded = {output: offloading(output) for output in OUTPUTS}
    for name, network in NETWORKS.items():
        crossing = None
        for output in OUTPUTS:
            latency, rate = pipeline(output, network)
            own_latency, own_rate = offloaded[output]
            rows.append(
                {
                    "label": f"{name}, {output} new tokens",
                    "pipeline_s": latency,
                    "offloading_s": own_latency,
                    "pipeline_tokens_per_s": rate,
                    "offloading_tokens_per_s": own_rate,
                }
            )
            if crossing is None and latency < own_latency:
                crossing = output
        where = "is never faster" if crossing is None else "is faster from the first token on"
        if crossing is not None and crossing > OUTPUTS[0]:
            where = f"is faster from {crossing} new tokens on, offloading with fewer"
        crossings.append(f"{name}: the pipeline {where}")
    return rows, crossings


def pipeline(output: int, network: Network) -> tuple[float, float]:
    """Return latency of all clients' sequences, and generated tokens per second of one GPU."""
    problem = _problem(output)
    # All nodes together hold the model. Their 8-bit weights are taken to be as fast as 16 bits on one large T4.
    gpu = problem.hardware.gpu
    assert gpu is not None
    whole = replace(
        problem, hardware=replace(problem.hardware, gpu=replace(gpu, memory_bytes=NODES * gpu.memory_bytes))
    )
    whole = replace(whole, limits={tier: whole.capacity(tier) for tier in TIERS})
    costs = predict(whole, Policy(CLIENT_SEQUENCES, 1, 1, 0, 1, 0, 1, 0), ZIGZAG, rounded=False)
    hidden_bytes = CLIENT_SEQUENCES * problem.config.hidden_size * problem.compute_bytes
    star = {"links": 2 * NODES, "busiest": NODES}  # the clients' link has every message
    first = pipeline_turns(costs.prefill_s, NODES, CLIENTS, PROMPT * hidden_bytes, network, **star).once_s
    seconds = first
    if output > 1:
        step_s = costs.decode_s / (output - 1)
        seconds += (output - 1) * pipeline_turns(step_s, NODES, CLIENTS, hidden_bytes, network, **star).again_s
    return seconds, CLIENTS * CLIENT_SEQUENCES * output / seconds / NODES


def offloading(output: int) -> tuple[float, float]:
    """Return latency of the same sequences on one T4, and the best block's generated tokens per second."""
    problem = _problem(output)
    sequences = CLIENTS * CLIENT_SEQUENCES
    few = replace(problem, workload=Workload.uniform(PROMPT, output, sequences), endless=False)
    latencies = []
    for gpu_batch_size in (2, 4, 6, 12):
        batches = sequences // gpu_batch_size
        for wg in (0.0, 0.1, 0.15, 0.2):
            made = predict(few, Policy(gpu_batch_size, batches, wg, 1 - wg, 1, 0, 1, 0), ZIGZAG, rounded=False)
            if made.feasible:
                latencies.append(made.latency_s)
    if not latencies:
        raise MemoryLimitError("twelve sequences of OPT-30B do not fit on the T4 of the profile")
    return min(latencies), search(problem, (ZIGZAG,)).prediction.tokens_per_s


def _problem(output: int) -> PlanningProblem:
    entry = resolve("opt-30b").entry
    assert entry is not None
    workload = Workload.uniform(PROMPT, output, 1)
    problem = SYSTEMS["flexgen"](
        entry.config, load_profile("t4"), workload, FP16, compute_bytes=2, limits={}, endless=True
    )
    return replace(problem, limits={tier: problem.capacity(tier) for tier in TIERS})


# --- Measured ---


def measured_rows(options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """Return measured and predicted seconds of a pipeline of two processes by network, or a note why there are none."""
    if why := why_not():
        return [], [f"nothing was measured: {why}"]
    networks = dict([*NETWORKS.items()][2:] if options.quick else NETWORKS)
    repeats = options.repeats or (1 if options.quick else 3)
    rows = []
    with tempfile.TemporaryDirectory(prefix="flexgen_bench.") as scratch:
        folder = Path(scratch)
        message_bytes = 4 * _save_model(folder) * MEASURED_REQUESTS // 2  # of a lane's decode step
        near_s = summary(_step_seconds(run_ranks(folder, None, repeats)))["median"]
        for name, network in networks.items():
            options.tell(f"measuring two processes over {name}")
            far = run_ranks(folder, network, repeats)
            # Gloo asks the receiver before it sends. A rank's own time hides in a turn only where it is longer.
            asked = replace(network, delay_s=GLOO_DELAYS * network.delay_s)
            predicted_s = near_s + pipeline_turns(0.0, 2, 2, message_bytes, asked, 2).again_s
            row = {"label": f"two processes, {name}, a decode step", **summary(_step_seconds(far))}
            rows.append({**row, "predicted_s": predicted_s, "without_network_s": near_s})
    return rows, ["two processes: measured seconds beside those without the network plus the network's term"]


def _step_seconds(seconds: Mapping[str, list[float]]) -> list[float]:
    """Return seconds of a decode step, from runs that differ in the number of steps only."""
    few, many = MEASURED_OUTPUTS
    return [(more - less) / (many - few) for less, more in zip(seconds[str(few)], seconds[str(many)])]


def run_ranks(folder: Path, network: Network | None, repeats: int) -> dict[str, list[float]]:
    """Return seconds by number of new tokens, measured by two ranks in namespaces of their own."""
    with namespaces(network) as (names, addresses):
        commands = [
            [
                "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
                f"--node-rank={rank}", "--nproc-per-node=1", f"--master-addr={addresses[0]}", "--master-port=29517",
                "-m", "flexgen_helm.benchmarks.network_task", str(folder), str(repeats),
            ]
            for rank, name in enumerate(names)
        ]  # fmt: skip
        ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(2)]
        for rank, command in enumerate(commands):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": names[rank], "OMP_NUM_THREADS": "1"}
            with logs[rank].open("wb") as sink:
                ranks.append(subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment))
        try:
            if any(process.wait(timeout=600) for process in ranks):
                raise FlexgenError(f"a rank failed:\n{log_tail(logs[0])}\n{log_tail(logs[1])}")
        finally:
            for process in ranks:
                process.kill()
    seconds: dict[str, list[float]] = json.loads((folder / "seconds.json").read_text())
    return seconds


def _save_model(folder: Path) -> int:
    """Save a random Llama without a tokenizer; return its hidden size."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return 512
