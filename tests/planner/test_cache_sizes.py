"""Cache sizes are those of the codec that packs the cache, page by page where the cache is on the
disk.
"""

import pytest
import torch

from flexgen_helm.kv_cache.codec import QuantizedCodec
from flexgen_helm.planner.cache_sizes import cache_sizes
from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.precisions import PRECISIONS, CacheFormat
from tests.helpers.planning_problems import config

OPT = config("opt-125m")  # 12 layers, 12 heads of 64 elements: 1,536 elements a token and layer
FORMATS = {
    **{
        name: precision.cache
        for name, precision in PRECISIONS.items()
        if precision.cache is not None
    },
    "keys alone": CacheFormat(GroupFormat(8, 32, "out"), None, residual_window=5),
    "filled groups": CacheFormat(
        GroupFormat(4, 128, "in"), GroupFormat(8, 48, "in"), residual_window=9
    ),
}


@pytest.mark.parametrize(
    "heads, dim, dtype", [(12, 64, torch.float16), (3, 80, torch.float32), (1, 16, torch.float16)]
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_group_takes_the_bytes_that_the_codec_writes(name, dtype, heads, dim):
    fmt = FORMATS[name]
    codec = QuantizedCodec(fmt, heads, dim, dtype)
    sizes = fmt.group_bytes(heads, dim, dtype.itemsize)
    k, v = torch.randn(2, codec.group_tokens, heads, dim).to(dtype)
    assert [plane.shape for plane in codec.encode(k, v)] == [(1, size) for size in sizes]


def test_a_quantized_cache_has_a_window_and_whole_pages_on_the_disk():
    fmt = PRECISIONS["4bit"].cache
    group = sum(fmt.group_bytes(12, 64, 4))
    in_memory, on_disk = (cache_sizes(OPT, fmt, 4, on_disk=flag) for flag in (False, True))
    assert in_memory.bytes_per_token == -(-12 * group // 64)
    assert on_disk.bytes_per_token == -(-12 * (-(-group // 4096) * 4096) // 64)
    assert in_memory.window_bytes == on_disk.window_bytes == (64 + 63) * 12 * 6144
    assert cache_sizes(OPT, fmt, 4, on_disk=False, one_layer=True).window_bytes == (64 + 63) * 6144
