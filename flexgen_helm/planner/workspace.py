"""Bytes that computing holds beside what the ledgers count: upper bounds from the shapes. No torch.

Counted as if nothing were freed before the operation that follows it.
"""

from __future__ import annotations

from flexgen_helm.models.config import QUERY_CHUNK_TOKENS, SCORE_TOKENS, ModelConfig, tensor_shapes
from flexgen_helm.planner.constants import KEPT_MASK_BYTES, UPCAST_ELEMENTS
from flexgen_helm.quant.precisions import CacheFormat


class Workspace:
    """Bounds for one model. element: bytes of one in the compute type. direct: scores are materialized, in float32.
    cache: what prompts see packed or in part, None where all is seen as it is."""

    def __init__(self, config: ModelConfig, element: int, direct: bool, cache: CacheFormat | None = None) -> None:
        self._config, self._element, self._direct, self._cache = config, element, direct, cache
        inner = max(shape[0] for name, shape in tensor_shapes(config).items() if name.endswith(".up.weight"))
        q, kv = config.q_size, config.num_kv_heads * config.head_dim
        # The states, their norm with two temporaries, both branches' results; then either q, k and v, their rotations
        # with three temporaries, the outputs twice; or gate, up, the activation, and a product whose tiles are joined.
        self._per_token = 6 * config.hidden_size + max(8 * q + 6 * kv, 5 * inner)
        self._masks = config.alibi or any(window is not None for window in config.windows)

    def layer(self, tokens: int, prompt: int, decoding: int, shared: tuple[int, int] = (0, 0)) -> int:
        """A layer over a batch.

        prompt: tokens of its longest one; decoding: cached positions that its other tokens attend to, over all of
        them; shared: tokens that attend to one segment, and its positions. Hidden states of the batch before, which
        leave, and of the next, which come, are each in a buffer of their transfer too.
        """
        config = self._config
        scores = 4 * config.num_heads * decoding
        users, positions = min(shared[0], SCORE_TOKENS), shared[1]
        if self._direct or self._masks:
            scores += 4 * config.num_heads * users * positions
        if self._direct:
            scores += 4 * config.num_heads * min(prompt, SCORE_TOKENS) * prompt
        elif self._masks:
            scores += 4 * prompt * prompt
        if self._cache is not None:
            # Two masks on their way to one slice of queries, with its keys and values side by side; the scores of a
            # choice, which is made by sums, the largest, and once more without the others.
            kv = config.num_kv_heads * config.head_dim
            choosing = 4 * 8 * config.num_heads * QUERY_CHUNK_TOKENS * prompt if self._cache.is_sparse else 0
            packed = KEPT_MASK_BYTES + 2 * 4 * QUERY_CHUNK_TOKENS * prompt + self._element * 4 * kv * prompt
            return self._layer(tokens, scores) + packed + choosing
        return self._layer(tokens, scores)

    def _layer(self, tokens: int, scores: int) -> int:
        config = self._config
        states = self._element * tokens * (self._per_token + 4 * config.hidden_size)
        return states + (4 if self._direct else 2) * scores + self._element * UPCAST_ELEMENTS

    def head(self, tokens: int, positions: int) -> int:
        """The head over some positions of a batch: logits in float32, joined from tiles, bent by a cap, drawn from."""
        copies = 5 if self._config.final_softcap is not None else 4
        asked = 4 * positions * (copies * self._config.vocab_size + 3 * self._config.hidden_size)
        return asked + self._element * (tokens * self._config.hidden_size + UPCAST_ELEMENTS)
