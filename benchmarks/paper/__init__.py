"""Published throughput tables against the cost model. No torch.

`systems` describes FlexGen, Accelerate and DeepSpeed to the cost model, and `tables` reads and
evaluates CSV files of throughputs (`python -m benchmarks.paper.tables FILE`). `rows` makes the rows
of the paper's tables, `page` the page of the documentation.
"""
