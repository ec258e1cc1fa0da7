"""Bytes of weights that are read, against the schedule's arithmetic."""

import pytest

from flexgen_helm import Engine, GenerationRequest, MemoryLimits
from flexgen_helm.offload.matrices import DiskMatrix, HostMatrix
from tests.helpers.offload import claims
from tests.helpers.parity import assert_same
from tests.helpers.tiny_models import VOCABULARY

MIB = 1 << 20
HALF = 2  # bytes of a stored element
PAGE = 4096


def matrix_bytes(model, *kinds):
    """Bytes of the reference's matrices whose names contain one of `kinds`."""
    named = dict(model.reference.named_parameters(remove_duplicate=False))
    return sum(
        HALF * p.numel()
        for name, p in named.items()
        if p.ndim == 2 and any(kind in name for kind in kinds)
    )


def streamed(model):
    """Bytes of all layers and the head: what one pass reads where nothing stays in memory."""
    head = VOCABULARY * model.reference.config.hidden_size * HALF
    return matrix_bytes(model, "layers.") + head


@pytest.fixture
def gathered(monkeypatch):
    """Bytes that table look-ups read from the disk, with the rows between, and bytes that they send
    over the link.
    """
    count = {"disk": 0, "link": 0}

    def counting(cls, on_disk):
        honest = cls.gather

        def gather(self, rows):
            row = self.shape[1] * HALF
            if on_disk:
                count["disk"] += int(rows.max() - rows.min() + 1) * row
            count["link"] += rows.numel() * row
            return honest(self, rows)

        monkeypatch.setattr(cls, "gather", gather)

    counting(DiskMatrix, True)
    counting(HostMatrix, False)
    return count


def same_length(count, prompt, new, **options):
    return [
        GenerationRequest(
            prompt_token_ids=[2 + (7 * i + j) % (VOCABULARY - 2) for j in range(prompt)], max_tokens=new,
            ignore_eos=True, **options,
        )
        for i in range(count)
    ]  # fmt: skip


def run(model, folder, requests, schedule, policy="3x2,0,0,0,100,0,100", **options):
    """Results and record of a run."""
    options = {"limits": MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB), **options}
    with Engine.from_pretrained(
        model.path, policy=policy, schedule=schedule, offload_dir=folder, **options
    ) as engine:
        results = engine.run(requests)
        assert all(result.error is None for result in results), results[0].error
        claims(engine)
        return results, engine.last_run


@pytest.mark.fast(4)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("variant", ["llama", "opt-untied"])
@pytest.mark.parametrize("schedule", ["zigzag", "row"])
def test_bytes_read_are_the_schedules_arithmetic(
    tiny, tmp_path, gathered, variant, schedule, overlap
):
    """zigzag: once a pass, n passes a block of 6; row: once for each of a pass's 2 batches of 3."""
    model, new, blocks = tiny(variant), 5, 2
    _, record = run(model, tmp_path, same_length(6 * blocks, 9, new), schedule, overlap=overlap)
    passes = blocks * new * {"zigzag": 1, "row": 2}[schedule]
    assert record["bytes"]["disk_to_cpu"]["weights"] - gathered["disk"] == passes * streamed(model)


def model_rows(engine, name):
    """Elements of a matrix."""
    from flexgen_helm.models.config import tensor_shapes

    rows, width = tensor_shapes(engine.model_config)[name]
    return rows * width


@pytest.mark.parametrize("one", [dict(max_tokens=1), dict(max_tokens=0, echo_logprobs=True)])
def test_prefill_only_reads_every_stage_once_for_the_whole_data_set(tiny, tmp_path, gathered, one):
    """Also where the hidden states of the data set exceed memory and wait on the disk."""
    model = tiny("llama")
    requests = [
        GenerationRequest(prompt_token_ids=request.prompt_token_ids, ignore_eos=True, **one)
        for request in same_length(60, 70, 1)
    ]
    options = dict(policy="4x2,0,0,0,100,0,100", limits=MemoryLimits(cpu=4 * MIB, disk=256 * MIB))
    results, record = run(model, tmp_path, requests, "prefill-only", **options)
    assert record["bytes"]["disk_to_cpu"]["weights"] - gathered["disk"] == streamed(model)
    states = 60 * 69 * model.reference.config.hidden_size * 4
    assert record["bytes"]["cpu_to_disk"]["activations"] > states, (
        "they were to wait on the disk, several times"
    )
    assert record["peak_bytes"]["cpu"] <= 4 * MIB and record["bytes"]["cpu_to_disk"]["cache"] == 0
    with Engine.from_pretrained(model.path) as engine:
        expected = engine.run(requests)
    assert_same(results, expected)


def test_a_second_token_is_refused_alone_where_the_schedule_has_none(tiny, tmp_path):
    sizes = [{"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": 1, "n": 3, "temperature": 1.0}]
    requests = [GenerationRequest(prompt_token_ids=[5, 6], **size) for size in sizes]
    with Engine.from_pretrained(
        tiny("llama").path, schedule="prefill-only", offload_dir=tmp_path
    ) as engine:
        one, two, three = engine.run(requests)
    assert one.error is None and len(three.completions) == 3
    assert "max_tokens is 2" in str(two.error) and "--schedule zigzag" in str(two.error)


@pytest.mark.parametrize(
    "policy", ["3x2,30,40,0,100,100,0", "3x2,0,50,0,100,100,0", "3x2,0,0,100,0,100,0"]
)
def test_matrices_from_disk_and_host_cross_the_link(tiny, tmp_path, gathered, policy):
    model, new = tiny("opt-untied"), 4
    with Engine.from_pretrained(
        model.path, policy=policy, device="sim", offload_dir=tmp_path,
        limits=MemoryLimits(gpu=64 * MIB, cpu=64 * MIB, disk=256 * MIB),
    ) as engine:  # fmt: skip
        tables = ("embed.tokens.weight", "embed.positions.weight")
        host = [
            name
            for name, tier in engine.placement.weights.items()
            if tier == "cpu" and name not in tables
        ]
        from_host = sum(HALF * model_rows(engine, name) for name in host)
    _, record = run(model, tmp_path, same_length(6, 9, new), "zigzag", policy=policy, device="sim")
    moved = record["bytes"]
    from_disk = moved["disk_to_cpu"]["weights"] - gathered["disk"]
    assert moved["cpu_to_gpu"]["weights"] - gathered["link"] == from_disk + new * from_host
    assert from_host > 0 or policy.startswith("3x2,0,0,")
