"""Formats of a packed cache in groups so small that tiny prompts fill some."""

from __future__ import annotations

from flexgen_helm.quant.formats import GroupFormat
from flexgen_helm.quant.precisions import CacheFormat

FORMATS = {
    "paper": CacheFormat(GroupFormat(4, 64, "in"), GroupFormat(4, 64, "in"), 1),
    "channels": CacheFormat(GroupFormat(4, 16, "out"), GroupFormat(4, 8, "in", "word"), 5),
    "both": CacheFormat(GroupFormat(4, 8, "out"), GroupFormat(4, 16, "out"), 20),
    "sparse": CacheFormat(None, None, 4, value_share=0.2),
    "sparse channels": CacheFormat(
        GroupFormat(4, 16, "out"), GroupFormat(4, 8, "in", "word"), 5, value_share=0.3
    ),
}
# A value that lies between two codes may fall to either side on paths whose sums are taken in
# another order; then one key or value moves by a step, and a few log-probabilities with it. So the
# mean is held to a tenth of what packing changes, and the largest only bounded.
MEAN, LARGEST = 2e-4, 0.05
