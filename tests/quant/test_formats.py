"""Group-wise quantization against slow direct formulas, one value at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.errors import UsageError
from flexgen_helm.quant import arithmetic, dequantization, packing
from flexgen_helm.quant.arithmetic import (
    NotQuantizableError,
    decode_words,
    from_codes,
    largest_value,
    to_codes,
    word_scales,
)
from flexgen_helm.quant.dequantization import dequantize_into, quantized_matmul
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.packing import dequantize, quantize
from flexgen_helm.quant.precisions import PRECISIONS

PAPER = GroupFormat(4, 64, "out", "pair", "range")
OURS = GroupFormat(4, 32, "out", "word", "error")
EIGHT, ROWS_IN_EIGHT = PRECISIONS["8bit"].weights, PRECISIONS["8bit"].tables


def matrix(rows, width, scale=1.0, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


formats = st.builds(
    lambda bits, group, axis, kind: GroupFormat(bits, group, axis, *kind),
    st.sampled_from([4, 8]),
    st.sampled_from([8, 32, 64, 128]),
    st.sampled_from(["in", "out"]),
    st.sampled_from([("pair", "range"), ("word", "range"), ("word", "error")]),
)
sizes = st.tuples(st.integers(1, 140), st.integers(1, 140))


@given(formats, sizes, st.floats(1e-6, 50.0), st.integers(0, 9))
@settings(max_examples=60)
def test_sizes_are_the_formula_and_errors_half_a_scale(fmt, size, scale, seed):
    rows, width = size
    values = matrix(rows, width, scale, seed)
    packed = quantize(values, fmt)
    # Written out: groups times code bits and scale bits, whole groups in the grouped direction.
    along, across = (width, rows) if fmt.axis == "in" else (rows, width)
    groups = math.ceil(along / fmt.group_size) * across
    bits = groups * (fmt.group_size * fmt.bits + (32 if fmt.scales == "pair" else 16))
    assert packed.numel() * 8 == bits == fmt.packed_bytes(rows, width) * 8
    back = dequantize(packed, fmt, rows, width)
    assert back.shape == values.shape and back.dtype == torch.float32
    if fmt.fit == "range":
        error, scale_of_group = (back - values).abs(), scales_of(values, fmt)
        # A word's zero point lies between codes by up to 1/254 of their range, and its scale is up
        # to 4.5 % above.
        slack = 0.5001 if fmt.scales == "pair" else 0.5001 * 1.045 + ((1 << fmt.bits) - 1) / 254
        assert (error <= slack * scale_of_group + 1e-7 * scale + 1.3e-7).all()


def scales_of(values, fmt):
    """(max - min) / (2^bits - 1) of every value's group, in double precision, with FP16's roundings
    allowed for.
    """
    work = values.double().numpy() if fmt.axis == "in" else values.double().numpy().T
    scales = np.empty_like(work)
    for row in range(work.shape[0]):
        for first in range(0, work.shape[1], fmt.group_size):
            part = work[row, first : first + fmt.group_size]
            least, greatest = part.min(), part.max()
            if fmt.scales == "word":
                least, greatest = min(least, 0.0), max(greatest, 0.0)
            scale = (greatest - least) / ((1 << fmt.bits) - 1)
            # offset down, scale up, each by at most one FP16 place; and the floor
            if fmt.scales == "pair":
                scale = scale * (1 + 2**-9) + abs(least) * 2**-9 + 2**-14
            scales[row, first : first + fmt.group_size] = scale
    return torch.from_numpy(scales if fmt.axis == "in" else scales.T.copy())


def test_the_papers_formula():
    """x_q = round((x - min) / (max - min) (2^b - 1)), 64 output channels share min and max."""
    values = matrix(128, 5, 0.1).half().float()
    packed = quantize(values, PAPER)
    back = dequantize(packed, PAPER, 128, 5)
    other_codes = 0
    for first in (0, 64):
        for column in range(5):
            group = values[first : first + 64, column].tolist()
            low, high = min(group), max(group)
            for row, x in enumerate(group):
                exact = (x - low) / (high - low) * 15
                direct = low + round(exact) * (high - low) / 15
                near = abs(float(back[first + row, column]) - direct) <= (high - low) * 2e-3
                # FP16's scale is a little above the exact one, so values halfway between codes may
                # round the other way.
                assert near or abs(exact % 1 - 0.5) < 0.02
                other_codes += not near
    assert other_codes < 0.01 * values.numel() + 1


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.37109375, 65504.0, -65504.0, 6e-8, 2.0**-14])
def test_constants_survive_exactly(axis, value):
    values = torch.full((70, 70), value)
    fmt = GroupFormat(4, 64, axis)
    # FP16 holds 6e-8 as its least subnormal number.
    assert torch.equal(dequantize(quantize(values, fmt), fmt, 70, 70), values.half().float())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", [PAPER, OURS], ids=["paper", "ours"])
def test_values_that_are_not_finite_are_refused(bad, fmt):
    values = matrix(64, 64)
    values[3, 5] = bad
    with pytest.raises(NotQuantizableError, match="not finite"):
        quantize(values, fmt)
    big = torch.full((64, 64), 1e38)
    big[::2] *= -1
    with pytest.raises(NotQuantizableError, match="65504"):
        quantize(big, PAPER)
    # 3,677 is 15 times the largest scale
    for values in (big.clamp(-1900, 1900), big.clamp(0, 3700)):
        with pytest.raises(NotQuantizableError, match="spans more than 3677"):
            quantize(values, OURS)
    near = big.clamp(-largest_value(OURS), largest_value(OURS))
    assert (dequantize(quantize(near, OURS), OURS, 64, 64) - near).abs().max() <= largest_value(
        OURS
    ) / 15


@pytest.mark.parametrize("fmt", [PAPER, OURS], ids=["paper", "ours"])
def test_saturation_changes_the_groups_that_cannot_be_quantized_and_no_others(fmt):
    """The cache's way: without an error, so that the host does not wait for a device."""
    values = matrix(128, 128)
    assert torch.equal(quantize(values, fmt, saturate=True), quantize(values, fmt))
    good = dequantize(quantize(values, fmt), fmt, 128, 128)
    limit = largest_value(fmt)
    values[3, 5], values[3, 6], values[4, 5], values[5, 5] = (
        math.nan,
        math.inf,
        -math.inf,
        -3 * limit,
    )
    back = dequantize(quantize(values, fmt, saturate=True), fmt, 128, 128)
    assert torch.isfinite(back).all() and back.abs().max() <= 2 * limit
    of_other_groups = torch.ones(128, 128, dtype=torch.bool)
    if fmt.axis == "in":
        of_other_groups[3:6, : fmt.group_size] = False
    else:
        of_other_groups[: fmt.group_size, 5:7] = False
    assert torch.equal(back[of_other_groups], good[of_other_groups])


def test_the_grid_of_words():
    scales = word_scales(torch.device("cpu"))
    assert (
        scales.shape == (512,)
        and float(scales[0]) == 2.0**-24
        and 2.0**7.9 < float(scales[-1]) < 2.0**8
    )
    ratios = scales[1:] / scales[:-1]
    assert torch.allclose(ratios, torch.tensor(2.0 ** (1 / 16)), rtol=1e-5)
    scale, offset = decode_words(torch.tensor([384 << 7 | 127, 384 << 7]), 4)
    assert scale.tolist() == [1.0, 1.0] and offset.tolist() == [-15.0, 0.0]


@given(st.integers(0, 30), st.sampled_from([1e-4, 0.05, 3.0]))
@settings(max_examples=20)
def test_the_fit_is_never_worse_than_the_range_and_near_the_best_word(seed, scale):
    values = matrix(3, 32, scale, seed)

    def cost(fit):
        fmt = GroupFormat(4, 32, "in", "word", fit)
        back = from_codes(*to_codes(values, fmt), fmt)
        return (back - values).square().sum(-1)

    assert (cost("error") <= cost("range") * 1.000001).all()
    # All words of a plausible scale, tried one by one.
    every = torch.arange(512 << 7, dtype=torch.int32)
    word_scale, offset = decode_words(every, 4)
    for row in range(3):
        largest = values[row].abs().max()
        near = (word_scale * 15 > 0.4 * largest) & (word_scale * 15 < 3 * largest)
        s, o = word_scale[near, None], offset[near, None]
        codes = ((values[row] - o) / s).round().clamp(0, 15)
        best = (codes * s + o - values[row]).square().sum(-1).min()
        assert cost("error")[row] <= 1.6 * best


def test_the_fit_of_a_part_is_that_of_the_whole(monkeypatch):
    """Large matrices are fitted in parts; groups do not see each other."""
    values = matrix(70, 3 * 32).view(70, 3, 32)
    whole = to_codes(values, OURS)
    monkeypatch.setattr(arithmetic, "_FITTED_VALUES", 11 * 32)
    in_parts = to_codes(values, OURS)
    assert torch.equal(whole[0], in_parts[0]) and torch.equal(whole[1], in_parts[1])


KERNELS = [
    PAPER,
    OURS,
    GroupFormat(4, 64, "in"),
    GroupFormat(4, 128, "in", "word"),
    EIGHT,
    ROWS_IN_EIGHT,
]
KERNELS += [GroupFormat(8, 24, "out", "pair"), GroupFormat(8, 64, "in", "pair")]


def apart(rows):
    """The same rows with others' bytes between them, as caches have; one row as a column's
    transpose.
    """
    if len(rows) == 1:
        return rows.t().contiguous().t()
    return torch.stack((rows, rows.flip(1)), 1).flatten(1)[:, : rows.shape[1]]


@pytest.mark.parametrize("fmt", KERNELS, ids=str)
@given(sizes, st.integers(1, 3))
@settings(max_examples=10)
def test_numba_kernels_give_the_numbers_of_plain_torch(fmt, size, threads):
    rows, width = size
    packed = apart(quantize(matrix(rows, width, 0.3), fmt))
    torch.set_num_threads(threads)
    out = torch.full((rows, width), math.nan)
    assert dequantize_into(packed, fmt, out) is out
    assert torch.equal(out, dequantize(packed, fmt, rows, width))


@pytest.mark.parametrize("fmt", [PAPER, OURS, GroupFormat(4, 8, "out", "word"), EIGHT], ids=str)
@given(sizes, st.integers(1, dequantization.QUANTIZED_MATMUL_ROWS), st.integers(1, 3))
@settings(max_examples=12)
def test_products_with_codes_equal_products_with_dequantized_weights(fmt, size, tokens, threads):
    rows, width = size
    packed = apart(quantize(matrix(rows, width, 0.3), fmt))
    x = matrix(tokens, width, 1.0, seed=1)
    torch.set_num_threads(threads)
    y = quantized_matmul(x, packed, fmt, rows)
    weights = dequantize(packed, fmt, rows, width).double()
    # Codes and offsets are summed apart and then cancel, so the error is relative to the sum of
    # absolute values.
    bound = 1e-6 * (x.double().abs() @ (weights.abs() + 1).t())
    assert y.shape == (tokens, rows) and ((y - x.double() @ weights.t()).abs() <= bound).all()


def test_products_read_codes_for_few_tokens_only():
    packed = quantize(matrix(64, 64), OURS)
    assert (
        quantized_matmul(matrix(dequantization.QUANTIZED_MATMUL_ROWS + 1, 64), packed, OURS, 64)
        is None
    )
    assert quantized_matmul(matrix(1, 64).half(), packed, OURS, 64) is None
    along = GroupFormat(4, 64, "in")
    assert quantized_matmul(matrix(1, 64), quantize(matrix(64, 64), along), along, 64) is None


@given(
    st.builds(
        GroupFormat,
        st.sampled_from([4, 8]),
        st.sampled_from([8, 24, 32, 64]),
        st.just("out"),
        st.just("word"),
        st.sampled_from(["range", "error"]),
    ),
    sizes,
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from(["normal", "outliers", "steps", "one sign", "constant", "tiny"]),
    st.integers(0, 99),
    st.integers(1, 3),
)
@settings(max_examples=60)
def test_packing_by_the_loop_gives_the_bytes_of_plain_torch(fmt, size, dtype, kind, seed, threads):
    values = matrix(*size, 0.02, seed)
    values = {
        "normal": values,
        "outliers": torch.where(values > 0.045, values * 300, values),
        # many values halfway between codes, many equal errors
        "steps": (values * 100).round() / 64,
        "one sign": -values.abs() - 0.3,
        "constant": values[:1].expand(size),
        "tiny": values * 1e-5,
    }[kind].to(dtype)
    torch.set_num_threads(threads)
    assert packing.loops() is not None
    found = quantize(values, fmt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "loops", lambda: None)
        assert torch.equal(found, quantize(values, fmt))


@pytest.mark.parametrize("dtype, seed", [(torch.float32, 0), (torch.bfloat16, 1)])
def test_sums_in_one_order_decide_near_ties_alike(monkeypatch, dtype, seed):
    """With sums in another order a few of these 65,536 groups get other words."""
    values = matrix(1024, 2048, 0.02, seed).to(dtype)
    found = quantize(values, OURS)
    monkeypatch.setattr(packing, "loops", lambda: None)
    assert torch.equal(found, quantize(values, OURS))


@pytest.mark.parametrize("row", [0, 31, 32, 69])
def test_the_packing_loop_refuses_what_plain_torch_refuses(row):
    for bad, message in (
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        (3700.0, "spans more than 3677"),
    ):
        values = matrix(70, 50)
        values[row, 49] = bad
        with pytest.raises(NotQuantizableError, match=message):
            quantize(values, OURS)


def test_the_numba_kernels_are_used(monkeypatch):
    """numba is among our requirements: without it these tests would compare plain operations with
    themselves.
    """
    packed = quantize(matrix(64, 64), OURS)
    with monkeypatch.context() as patch:
        patch.setattr(dequantization, "dequantize_with_torch", None)
        for fmt in KERNELS:
            dequantize_into(quantize(matrix(64, 64), fmt), fmt, torch.empty(64, 64))
    monkeypatch.setattr(dequantization, "loops", lambda: None)
    assert torch.equal(
        dequantize_into(packed, OURS, torch.empty(64, 64)), dequantize(packed, OURS, 64, 64)
    )


@pytest.mark.parametrize(
    "bits, group, fit",
    [(3, 64, "range"), (16, 64, "range"), (4, 4, "range"), (4, 20, "range"), (4, 64, "error")],
)
def test_impossible_formats_are_refused(bits, group, fit):
    with pytest.raises(UsageError):
        GroupFormat(bits, group, "in", "pair", fit)
