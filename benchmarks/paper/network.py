"""A pipeline over slow links against offloading on one device: the paper's comparison with Petals, by the cost model.

OPT-30B, prompts of 512 tokens, over four T4s that hold all of it, as the paper used Petals (six clients with two
sequences each, which send hidden states to each node and get them back), and offloaded on one T4. Latency is that of
twelve sequences on both sides; throughput is that of Petals' load, for each GPU, and that of offloading's best block.

A batch passes the stages one after the other, and a link between each two of them. Several batches follow each other,
so that stages and links work at the same time:

    one batch      m t + h (b + d)             m stages of t seconds, h links of d seconds delay and b seconds a message
    each further   + max(t, c b)               the slowest of stages and links; the busiest link has c messages

In decoding a batch starts again once its token has come back, so n batches take turns of max(the time of one batch,
n max(t, c b)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flexgen_helm.benchmarks.paper.systems import PaperProblem
from flexgen_helm.benchmarks.paper.tables import full_memory
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.errors import MemoryLimitError
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.policy import ZIGZAG, Policy, Workload
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.problem import PlanningProblem
from flexgen_helm.planner.search import search
from flexgen_helm.quant.precisions import FP16

MBIT = 1e6 / 8


@dataclass(frozen=True)
class Network:
    """Links between machines. delay_s: of a message, one way; bytes_s: of one link."""

    delay_s: float
    bytes_s: float


NETWORKS: Mapping[str, Network] = {
    "10 ms, 1 Gbit/s": Network(0.01, 1000 * MBIT),
    "10 ms, 100 Mbit/s": Network(0.01, 100 * MBIT),
    "100 ms, 100 Mbit/s": Network(0.1, 100 * MBIT),
}
PROMPT = 512
# The paper's Petals: nodes, parallel clients on one machine, and sequences of a client's request.
NODES, CLIENTS, CLIENT_SEQUENCES = 4, 6, 2


@dataclass(frozen=True)
class Turns:
    """Seconds of a pass of several batches: until all have passed the pipeline, and of each turn in decoding."""

    once_s: float
    again_s: float


def pipeline_turns(
    pass_s: float, stages: int, batches: int, message_bytes: float, network: Network, links: int, busiest: int = 1
) -> Turns:
    """Return how long batches take to pass a pipeline.

    pass_s: of one batch through all stages, without the network.
    message_bytes: of one batch's hidden states.
    links: that a batch crosses, from where prompts are to where tokens are drawn and back.
    busiest: of them, those that are one and the same in one direction.
    """
    stage_s, message_s = pass_s / stages, message_bytes / network.bytes_s
    one = pass_s + links * (message_s + network.delay_s)
    slowest = max(stage_s, busiest * message_s)
    return Turns(one + (batches - 1) * slowest, max(one, batches * slowest))


def pipeline(output: int, network: Network) -> tuple[float, float]:
    """Return latency of all clients' sequences, and generated tokens per second of one GPU."""
    problem = _problem(output)
    # All nodes together hold the model. Their 8-bit weights are taken to be as fast as 16 bits on one large T4.
    gpu = problem.hardware.gpu
    assert gpu is not None
    whole = replace(
        problem, hardware=replace(problem.hardware, gpu=replace(gpu, memory_bytes=NODES * gpu.memory_bytes))
    )
    costs = predict(full_memory(whole), Policy(CLIENT_SEQUENCES, 1, 1, 0, 1, 0, 1, 0), ZIGZAG, rounded=False)
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
    hardware = load_profile("t4")
    return full_memory(PaperProblem(entry.config, hardware, workload, FP16, compute_bytes=2, limits={}, endless=True))
