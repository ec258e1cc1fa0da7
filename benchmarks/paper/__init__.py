"""Published throughput tables against the cost model: `flexgen-helm plan --from-csv`. No torch.

`systems` describes FlexGen, Accelerate and DeepSpeed to the cost model, `tables` reads and evaluates the rows.
"""
