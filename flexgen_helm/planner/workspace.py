"""Upper bounds of the memory that computing takes besides what the ledgers count, from the shapes.
No torch.

Temporaries are counted as if each were freed only after the operation that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from flexgen_helm.models.config import (
    QUANTIZED_TOKENS,
    QUERY_CHUNK_TOKENS,
    SCORE_TOKENS,
    ModelConfig,
    tensor_shapes,
)
from flexgen_helm.quant.precisions import CacheFormat
from flexgen_helm.tiers import (
    BATCH_TOKENS,
    DEVICE_UPCAST_ELEMENTS,
    HOST_UPCAST_ELEMENTS,
    MAX_BATCH_TOKENS,
    MAX_TRANSFER_BYTES,
    SAMPLED_ELEMENTS,
    Tier,
)

# Float32 copies that a module with states makes of a token's elements, and of a state: the chunked
# delta rule and Mamba's scan take 6 to 10 of the first, measured for 512 to 2,048 tokens.
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

    element: bytes of an element in the compute dtype.
    tier: that computes.
    cache: format of a quantized or sparse cache; None for one in the compute dtype.
    converts: weights have another dtype than products, or are packed.
    has_fused_attention: the device has a kernel that keeps scores in registers.
    product_bytes: that a product takes besides its operands (`kernels.amx`).
    """

    config: ModelConfig
    element: int
    tier: Tier
    cache: CacheFormat | None = None
    converts: bool = True
    has_fused_attention: bool = True
    product_bytes: int = 0

    @cached_property
    def _direct(self) -> bool:
        """Whether scores are kept whole.

        Fused kernels know no soft cap, and on a device no bias in float32 beside queries in 16
        bits, and no heads that are not whole 16 bytes.
        """
        config = self.config
        is_odd = config.has_score_bias or config.head_dim * self.element % 16 > 0
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
    def _masks(self) -> bool:
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
        config, cache = self.config, self.cache
        scores = 4 * config.num_heads * decoding
        users, positions = min(shared[0], SCORE_TOKENS), shared[1]
        if self._direct or self._masks:
            scores += 4 * config.num_heads * users * positions
        if self._direct:
            scores += 4 * config.num_heads * min(prompt, SCORE_TOKENS) * prompt
        elif self._masks:
            scores += 4 * prompt * prompt
        states = self.element * tokens * (self._elements_per_token + 4 * config.state_size)
        # rows of a tile of `models.routing`, and on a device all results
        if (experts := config.experts) is not None:
            rows, hidden = tokens * experts.per_token, config.hidden_size
            sorted_rows = min(rows, MAX_BATCH_TOKENS) * (5 * experts.ffn_size + 3 * hidden)
            sorted_rows += rows * hidden * (self.tier == "gpu")
            states = max(
                states, self.element * (sorted_rows + tokens * (6 * hidden + 4 * config.state_size))
            )
        states += self._mixing(tokens, prompt)
        total = states + (4 if self._direct else 2) * scores + self.element * self._upcast_elements
        total += self.product_bytes
        if cache is not None:
            # Two masks of a query chunk, and the quantized and full-precision versions of keys and
            # values.
            quantized = min(tokens, max(prompt, QUANTIZED_TOKENS))
            total += (
                2 * 4 * QUERY_CHUNK_TOKENS * prompt + self.element * 4 * config.kv_size * quantized
            )
            # scores of a top-k selection: their sums, the largest, and a copy without the others
            if cache.is_sparse:
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
        return logits + self.element * (tokens * self.config.state_size + self._upcast_elements)

    def room_beside(self, limit: float) -> int:
        """Return what a limit leaves beside the workspace of a full batch, at least two thirds of
        it.
        """
        full = self.layer(MAX_BATCH_TOKENS, BATCH_TOKENS, 0) + MAX_TRANSFER_BYTES
        return int(limit - min(limit / 3, full))
