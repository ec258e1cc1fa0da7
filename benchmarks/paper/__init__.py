"""Published throughput tables against the cost model: `bench paper` and `plan --from-csv`. No torch.

`systems` describes FlexGen, Accelerate and DeepSpeed to the cost model, and `tables` reads and evaluates CSV files of
throughputs. `comparison` has the paper's tables, `rows` makes their rows, and `page` the page of the documentation.
"""

from __future__ import annotations

from typing import Any

from flexgen_helm.benchmarks import Options


def run(options: Options) -> dict[str, Any]:
    """Return the paper's tables with predictions and measurements."""
    from flexgen_helm.benchmarks.paper import comparison

    return comparison.run(options)
