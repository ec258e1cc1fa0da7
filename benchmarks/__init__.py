"""Benchmarks, a script each: `python -m benchmarks.NAME --help`, installed
`-m flexgen_helm.benchmarks.NAME`.

    clients   whole runs with our client, with HELM's, and by llama.cpp's server
    accuracy  LAMBADA and WikiText-2, beside lm-evaluation-harness
    offload   weights streamed from the disk, against memory, Accelerate, and 4 bits
    ablation  each technique left out, on a simulated GPU
    policy    predicted against measured time, and other policies
    gpu       a GPU's rates, and large models in little of its memory (`make gpu-check`)
    paper     tables of the FlexGen paper, predicted for its T4 and measured

All sides of a comparison are measured in one call, in alternation; close other programs first.
Files of a run are in TMPDIR. A result is printed, and written where `-o FILE.json` says:

    {name, date, hardware, versions, rows: [{label, …, median, min, max, n}], ratios, notes, …}

`rows` are seconds unless a row's label says otherwise. `ratios` are above 1 where flexgen_helm is
faster.
`notes` are the sentences that a reader needs with them.
"""
