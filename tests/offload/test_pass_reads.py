"""What progress says of a pass: its layer, what it has read of how many bytes, and how fast the
disk is.
"""

import itertools

import pytest

from flexgen_helm import Engine
from flexgen_helm.request import GenerationRequest


@pytest.mark.parametrize("schedule", ["zigzag", "row"])
def test_an_engine_says_where_its_pass_is_and_what_it_has_read(
    tiny, tmp_path, monkeypatch, schedule
):
    monkeypatch.setattr("flexgen_helm.engine.run._REPORT_EVERY_S", 0.0)
    requests = [
        GenerationRequest(prompt_token_ids=[3 + n] * 9, max_tokens=4, ignore_eos=True)
        for n in range(6)
    ]
    seen = []
    options = {
        "policy": "3x2,0,0,0,100,0,100",
        "schedule": schedule,
        "device": "cpu",
        "offload_dir": tmp_path,
    }
    with Engine.from_pretrained(tiny("llama").path, **options) as engine:
        engine.run(requests, progress=seen.append)
        read, layers = (
            engine.last_run["bytes"]["disk_to_cpu"]["weights"],
            engine.model_config.num_layers,
        )
        on_disk = sum(engine.placement.bytes_on("disk").values())
    assert [p.num_passes for p in seen] == sorted(p.num_passes for p in seen) and seen[
        -1
    ].num_passes == 4
    for _, reports in itertools.groupby(seen, key=lambda p: p.num_passes):
        reports = list(reports)
        visited, amounts = [p.layer for p in reports], [p.read_bytes for p in reports]
        assert {*visited} == {*range(1, layers + 1)} and {p.num_layers for p in reports} == {layers}
        assert (visited == sorted(visited)) == (schedule == "zigzag"), (
            "row takes a batch through all layers first"
        )
        assert amounts == sorted(amounts) and amounts[-1] <= reports[-1].pass_bytes
    assert seen[0].pass_bytes == on_disk and read > 2 * on_disk
    with Engine.from_pretrained(tiny("llama").path, device="cpu") as engine:
        engine.run(requests, progress=seen.append)
    assert seen[-1].pass_bytes == seen[-1].read_bytes == seen[-1].read_bytes_s == 0
