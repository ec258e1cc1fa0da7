"""Upper bounds of the memory that computing takes besides what the ledgers count, from the shapes.
No torch.

Temporaries are counted as if each were freed only after the operation that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from flexgen_helm.models.config import ModelConfig, tensor_shapes
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.shared_sizes import (
    BATCH_TOKENS,
    DEVICE_UPCAST_ELEMENTS,
    HOST_UPCAST_ELEMENTS,
    MAX_BATCH_TOKENS,
    MAX_TRANSFER_BYTES,
    QUANTIZED_TOKENS,
    QUERY_CHUNK_TOKENS,
    SAMPLED_ELEMENTS,
    SCORE_TOKENS,
)
from flexgen_helm.tiers import Tier

# Float32 copies that a module with states makes of a token's elements, and of a state. Measured for
# 512 to 2,048 tokens, the chunked delta rule and Mamba's scan make 6 to 10 of the first: the bound
# leaves room for other modules.
_MIXER_COPIES, _STATE_COPIES = 16, 6


def upcast_elements(matrix_elements: int, on_device: bool) -> int:
    """Return how many elements of a matrix are brought to the compute dtype at once, for a product
    with them.
    """
    return min(matrix_elements, DEVICE_UPCAST_ELEMENTS if on_device else HOST_UPCAST_ELEMENTS)


@lru_cache(maxsize=8)
def _largest_matrix(config: ModelConfig) -> int:
    """Return the elements of the largest matrix.

    A mixture has thousands of matrices, and a search asks hundreds of times.
    """
    return max(prod(shape) for shape in tensor_shapes(config).values() if len(shape) > 1)


def widest_matrix(config: ModelConfig) -> int:
    """Return the columns of the widest matrix."""
    return max(shape[1] for shape in tensor_shapes(config).values() if len(shape) == 2)


@dataclass(frozen=True)
class Workspace:
    """Bounds for one model.

    element_bytes: of an element in the compute dtype.
    tier: that computes.
    cache: format of a quantized or sparse cache; None for one in the compute dtype.
    converts: weights have another dtype than products, or are packed.
    has_fused_attention: the device has a kernel that keeps scores in registers.
    product_bytes: that a product takes besides its operands (`kernels.amx`).
    """

    config: ModelConfig
    element_bytes: int
    tier: Tier
    cache: CacheFormat | None = None
    converts: bool = True
    has_fused_attention: bool = True
    product_bytes: int = 0

    @cached_property
    def _keeps_scores(self) -> bool:
        """Whether scores are kept whole.

        Fused kernels know no soft cap, and on a device no bias in float32 beside queries in 16
        bits, and no heads that are not whole 16 bytes.
        """
        config = self.config
        is_odd = config.has_score_bias or config.head_dim * self.element_bytes % 16 > 0
        return (
            config.attn_softcap is not None
            or not self.has_fused_attention
            or (self.tier == "gpu" and is_odd)
        )

    @cached_property
    def _upcast_elements(self) -> int:
        # On the CPU PyTorch's product may pack a copy of the tile that was upcast.
        copies = 0 if not self.converts else 1 if self.tier == "gpu" else 2
        return copies * upcast_elements(_largest_matrix(self.config), self.tier == "gpu")

    @cached_property
    def _elements_per_token(self) -> int:
        # The states, their norm with two temporaries and both branches' results; then the larger
        # of: q, k, v, their rotations with three temporaries, the outputs twice, and in float64
        # where more keys are to come; gate, up, activation and a product joined from tiles.
        config = self.config
        attention, ffn = 10 * config.q_size + 6 * config.kv_size, 5 * config.widest_ffn
        return 6 * config.num_streams * config.hidden_size + max(attention, ffn)

    @cached_property
    def _has_masks(self) -> bool:
        return self.config.has_score_bias or any(
            window is not None for window in self.config.windows
        )

    def layer(
        self, tokens: int, prompt: int, decoding: int, shared: tuple[int, int] = (0, 0)
    ) -> int:
        """Bound the bytes of one layer over a batch of `tokens` tokens.

        Included are transfer buffers for the hidden states of the previous and of the next batch.

        prompt: tokens of the longest prompt.
        decoding: cached positions that decoding tokens attend to, over all of them.
        shared: tokens that attend to one shared prefix, and its positions.
        """
        return (
            max(self._states(tokens), self._experts(tokens))
            + self._mixing(tokens, prompt)
            + self._scores(prompt, decoding, *shared)
            + self._cache_reading(tokens, prompt)
            + self.element_bytes * self._upcast_elements
            + self.product_bytes
        )

    def _states(self, tokens: int) -> int:
        """Bound what a layer makes of hidden states, and those of the batches around this one."""
        return (
            self.element_bytes
            * tokens
            * (self._elements_per_token + 4 * self.config.hidden_elements)
        )

    def _experts(self, tokens: int) -> int:
        """Bound the same where tokens are sorted by experts."""
        experts, hidden = self.config.experts, self.config.hidden_size
        if experts is None:
            return 0
        rows = tokens * experts.per_token
        # A tile of `models.routing`: gate, up, activation and a product joined from tiles, as in
        # `_elements_per_token`; its rows of hidden states, their results, and these weighed.
        elements = min(rows, MAX_BATCH_TOKENS) * (5 * experts.ffn_size + 3 * hidden)
        if self.tier == "gpu":  # all results
            elements += rows * hidden
        return self.element_bytes * (
            elements + tokens * (6 * hidden + 4 * self.config.hidden_elements)
        )

    def _scores(self, prompt: int, decoding: int, users: int, positions: int) -> int:
        """Bound the scores of attention in float32: with their softmax, and where they are kept
        with what is added to them and what a soft cap makes of them.

        users, positions: tokens that attend to one shared prefix, and its positions.
        """
        heads, elements = self.config.num_heads, self.config.num_heads * decoding
        if self._keeps_scores or self._has_masks:
            elements += heads * min(users, SCORE_TOKENS) * positions
        if self._keeps_scores:
            elements += heads * min(prompt, SCORE_TOKENS) * prompt
        elif self._has_masks:
            elements += prompt * prompt
        return (4 if self._keeps_scores else 2) * 4 * elements

    def _cache_reading(self, tokens: int, prompt: int) -> int:
        """Bound what a quantized or sparse cache takes."""
        cache, config = self.cache, self.config
        if cache is None:
            return 0
        # quantized and full-precision versions of keys and values
        quantized = min(tokens, max(prompt, QUANTIZED_TOKENS))
        total = self.element_bytes * 2 * 2 * config.kv_size * quantized
        total += 2 * 4 * QUERY_CHUNK_TOKENS * prompt  # two masks of a query chunk
        if cache.is_sparse:
            # of a top-k selection, 4 times: scores, sums, the largest, and a copy without the rest
            total += 4 * 8 * config.num_heads * QUERY_CHUNK_TOKENS * prompt
        return total

    def _mixing(self, tokens: int, prompt: int) -> int:
        """Bound the bytes of a module with states: one prompt at a time, or the next token of all
        sequences.
        """
        config = self.config
        state = 4 * _STATE_COPIES * max(config.layer_states)
        token = 4 * _MIXER_COPIES * config.mixer_width
        return prompt * token + state if prompt else tokens * (token + state)

    def head(self, tokens: int, positions: int) -> int:
        """Bound the bytes of the head over `positions`: float32 logits, joined from tiles, capped
        and sampled.

        What is sampled at once takes float64 probabilities, their order and their sums.
        """
        vocabulary = self.config.vocab_size
        copies = 5 if self.config.caps_logits else 4
        logits = 4 * positions * (copies * vocabulary + 3 * self.config.hidden_size)
        logits += (
            5 * 8 * vocabulary * min(positions, max(1, SAMPLED_ELEMENTS[self.tier] // vocabulary))
        )
        return logits + self.element_bytes * (
            tokens * self.config.hidden_elements + self._upcast_elements
        )

    def room_beside(self, limit: float) -> int:
        """Return what a limit leaves beside the workspace of a full batch, at least two thirds of
        it.
        """
        full = self.layer(MAX_BATCH_TOKENS, BATCH_TOKENS, 0) + MAX_TRANSFER_BYTES
        return int(limit - min(limit / 3, full))
