"""The paper's table of four GPUs: generation and decoding throughput of 1 and 4 T4s, against the planner's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from flexgen_helm.benchmarks.paper.systems import SYSTEMS
from flexgen_helm.benchmarks.paper.tables import full_memory, hardware_of, predict_row
from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.hardware.profile import HardwareProfile
from flexgen_helm.planner.policy import ZIGZAG, Workload
from flexgen_helm.planner.predict import CostEstimate
from flexgen_helm.planner.search import search
from flexgen_helm.quant.precisions import FP16

_MODELS = ("opt-6.7b", "opt-30b", "opt-175b")
_PROMPT, _OUTPUT = 512, 32


def evaluate_pipeline(paper: Path, hardware: HardwareProfile) -> pd.DataFrame:
    """Return a row for each model, number of GPUs and metric: measured and predicted tokens/s, and the error.

    One GPU has the policy that the paper names. For four the paper names none: they have the search's, in the model of
    the authors' engine.
    paper: folder of the paper's tables.
    """
    measured = (
        pd.read_csv(paper / "pipeline_4gpu_512_T4.csv").set_index(["system", "num_gpus", "metric"]).loc["FlexGen"]
    )
    policies = pd.read_csv(paper / "throughput.csv", dtype=str, keep_default_na=False)
    rows = []
    for model in _MODELS:
        is_own = (policies.table == "throughput_512") & (policies.system == "FlexGen") & (policies.model == model)
        line = {str(name): str(text) for name, text in policies[is_own].iloc[0].items()}
        sequences = int(line["gpu_batch_size"]) * int(line["num_gpu_batches"])
        predictions = {1: (predict_row(line, hardware), sequences), 4: _best(model, hardware_of(line, hardware), 4)}
        for num_gpus, (prediction, block) in predictions.items():
            for metric, predicted in _metrics(prediction, block):
                figure = float(measured.loc[(num_gpus, metric), model.replace("-", "_").replace(".", "_")])
                rows.append((model, num_gpus, metric, figure, predicted, predicted / figure - 1))
    return pd.DataFrame(rows, columns=["model", "num_gpus", "metric", "measured", "predicted", "error"])


def _best(model: str, hardware: HardwareProfile, stages: int) -> tuple[CostEstimate, int]:
    entry = resolve(model).entry
    assert entry is not None
    workload = Workload.uniform(_PROMPT, _OUTPUT, 1)
    problem = SYSTEMS["flexgen"](
        entry.config, hardware, workload, FP16, compute_bytes=2, limits={}, endless=True, stages=stages
    )
    solution = search(full_memory(problem), (ZIGZAG,))
    return solution.prediction, solution.policy.block_size


def _metrics(prediction: CostEstimate, sequences: int) -> Iterator[tuple[str, float]]:
    yield "generation tokens/s", prediction.tokens_per_s
    yield "decoding tokens/s", sequences * (_OUTPUT - 1) / prediction.decode_s
