"""Norms, rotations, gates and the storing of new tokens equal their formulas in float64, for any
shape and threads.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_helm.kernels import layer_rows

layer_loop = pytest.importorskip("flexgen_helm.kernels.layer_loop")

SHAPES = {"rows": st.integers(1, 40), "threads": st.integers(1, 3), "seed": st.integers(0, 1 << 16)}


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    width=st.integers(1, 3000),
    plus_one=st.booleans(),
    has_weight=st.booleans(),
    is_part=st.booleans(),
    **SHAPES,
)
def test_norm(rows, threads, seed, width, plus_one, has_weight, is_part):
    x = normal(seed, rows, width + 5)[:, 3 : width + 3] if is_part else normal(seed, rows, width)
    weight = normal(seed + 1, width) if has_weight else None
    torch.set_num_threads(threads)
    y = layer_rows.rms_norm(x, weight, 1e-3, plus_one and has_weight)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    if weight is not None:
        exact *= weight.double() + plus_one
    assert y is not None and y.is_contiguous()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(
    heads=st.integers(1, 9),
    half=st.integers(1, 70),
    more=st.integers(0, 20),
    is_part=st.booleans(),
    **SHAPES,
)
def test_rotation(rows, threads, seed, heads, half, more, is_part):
    width = 2 * half + more
    x = (
        normal(seed, rows, heads + 2, width)[:, 1:-1]
        if is_part
        else normal(seed, rows, heads, width)
    )
    cos, sin = normal(seed + 1, 2, rows, 1, 2 * half).unbind()
    torch.set_num_threads(threads)
    y = layer_rows.rotate(x, cos, sin)
    first, second, left = x.double().split((half, half, more), -1)
    exact = torch.cat((first * cos[..., :half] - second * sin[..., :half],
                       second * cos[..., half:] + first * sin[..., half:], left), -1)  # fmt: skip
    assert y is not None and y.is_contiguous()
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(name=st.sampled_from(["silu", "gelu_tanh"]), width=st.integers(1, 1500), **SHAPES)
def test_gate(rows, threads, seed, name, width):
    x, up = 8 * normal(seed, rows, width), normal(seed + 1, rows, width)
    inner = F.silu(x.double()) if name == "silu" else F.gelu(x.double(), approximate="tanh")
    torch.set_num_threads(threads)
    y = layer_rows.gate(name, x, up)
    assert y is x
    torch.testing.assert_close(y.double(), inner * up.double(), rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(heads=st.integers(1, 5), width=st.integers(1, 70), units=st.integers(1, 9), **SHAPES)
def test_put(rows, threads, seed, heads, width, units):
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    units_of_rows = torch.randint(units, (rows,), generator=torch.Generator().manual_seed(seed))
    target, new = (
        normal(seed, rows, heads, units, width),
        normal(seed + 1, rows, 2 * heads, width)[:, ::2],
    )
    expected = target.clone()
    expected.movedim(2, 1)[slots, units_of_rows] = new
    torch.set_num_threads(threads)
    layer_rows.put_rows(target.movedim(2, 1), slots, units_of_rows, new)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_where_it_is(value):
    """A sequence whose values are not finite fails by them, and its neighbours go on."""
    x = normal(0, 3, 64)
    whole = layer_rows.rms_norm(x, None, 1e-5, False)
    x[1, 7] = value
    y = layer_rows.rms_norm(x, None, 1e-5, False)
    assert not y[1].isfinite().all() and torch.equal(y[::2], whole[::2])
    for name, formula in (("silu", F.silu), ("gelu_tanh", lambda z: F.gelu(z, approximate="tanh"))):
        gated = layer_rows.gate(name, x.clone(), torch.ones_like(x))
        torch.testing.assert_close(gated, formula(x), equal_nan=True, rtol=1e-5, atol=1e-6)
    rotated = layer_rows.rotate(x.view(3, 2, -1), torch.ones(3, 1, 32), torch.ones(3, 1, 32))
    assert not rotated[1].isfinite().all() and rotated[::2].isfinite().all()


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_every_number_of_16_bits_is_activated(name):
    x = (
        torch.arange(1 << 16, dtype=torch.int32)
        .to(torch.uint16)
        .view(torch.bfloat16)
        .float()
        .view(16, -1)
    )
    exact = F.silu(x.double()) if name == "silu" else F.gelu(x.double(), approximate="tanh")
    y = layer_rows.gate(name, x.clone(), torch.ones_like(x))
    finite = x.isfinite()
    torch.testing.assert_close(y[finite].double(), exact[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heads", [8, 7])
def test_a_row_does_not_depend_on_its_neighbours(heads):
    width = heads * 26
    x, up, weight = normal(0, 300, width), normal(1, 300, width), normal(2, width)
    cos, sin = normal(3, 2, 300, 1, 20).unbind()
    for one in (
        lambda rows: layer_rows.rms_norm(x[rows], weight, 1e-5, False),
        lambda rows: layer_rows.gate("silu", x[rows].clone(), up[rows]),
        lambda rows: layer_rows.gate("gelu_tanh", x[rows].clone(), up[rows]),
        lambda rows: layer_rows.rotate(x[rows].view(-1, heads, 26), cos[rows], sin[rows]),
    ):
        assert torch.equal(one(slice(0, 300))[17:18], one(slice(17, 18)))


def test_what_does_not_suit_is_left_to_pytorch(monkeypatch):
    """No loop reads other dtypes, layouts, or fewer elements than it would take for given."""
    monkeypatch.setattr(layer_rows, "run_on_threads", None)
    x = normal(0, 4, 64)
    for part in (x.half(), x.t(), x[:0]):
        y = layer_rows.rms_norm(part, None, 1e-5, False)
        assert (y.shape, y.dtype) == (part.shape, part.dtype)
    assert (
        layer_rows.gate("relu", x.clone(), x) is layer_rows.gate("silu", x[:, :7], x[:, :7]) is None
    )
    heads, cos = x.view(4, 2, 32), x.view(4, 1, 64)[..., :32]
    assert layer_rows.rotate(heads.double(), cos, cos).dtype == torch.float64
    with pytest.raises(RuntimeError):
        layer_rows.rms_norm(x, normal(1, 63), 1e-5, False)
    with pytest.raises(RuntimeError):
        layer_rows.rotate(heads, normal(1, 3, 1, 20), normal(1, 3, 1, 20))
    one = torch.zeros(1, dtype=torch.int64)
    stored = layer_rows.put_rows(
        torch.zeros(1, 2, 3, 4, dtype=torch.uint8), one, one, torch.ones(1, 3, 4).byte()
    )
    assert stored[0].flatten(1).tolist() == [[1] * 12, [0] * 12]


@pytest.mark.parametrize("width", [4096, 16_384, 65_536])
def test_a_norm_does_not_lose_small_elements_beside_a_large_one(width):
    """Sums of 512 squares, added up in 64 bits; in one float32 sum those of the small ones are
    partly lost.
    """
    x = torch.full((3, width), 0.05)
    x[:, 0] = 0.3 * width**0.5
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = layer_rows.rms_norm(x, torch.ones(width), 1e-6, False)
    assert ((found.double() - exact) / exact).abs().max() < 3e-7
    squares = x[0].square().numpy().cumsum(dtype="float32")[-1]
    assert abs(squares / x[0].double().square().sum().item() - 1) > 1e-6
