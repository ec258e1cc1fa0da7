"""What a child process of `device_trial` compares on a device: a small model, kernels and copies, path by path."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.config import EngineConfig
from flexgen_helm.engine.engine import Engine
from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.proof import largest_difference, random_reference, trial_folder, trial_requests
from flexgen_helm.hardware.process_state import (
    ATTENTION,
    COPIES,
    HALVES,
    PLAIN,
    REGISTERED,
    TRITON,
    exact_products,
    switched_off,
)
from flexgen_helm.models.attention import AttentionConfig, additive_mask, attend, attend_unfused
from flexgen_helm.models.miniature import VOCABULARY
from flexgen_helm.offload.transfer_manager import CudaCopyEngine
from flexgen_helm.planner.policy import Policy
from flexgen_helm.quant.kernels import dequantize_into, dequantize_with_torch, quantized_matmul
from flexgen_helm.quant.packing import quantize
from flexgen_helm.quant.precisions import PRECISIONS

_RESIDENT, _ALL_TIERS = Policy(3, 2, 1, 0, 1, 0, 1, 0), Policy(3, 2, *(0.3,) * 6)
# Bounds of log-probabilities in float32 and in 16 bits, and of products relative to the largest value.
_EXACT, _ROUGH = 1e-3, 0.1
_RELATIVE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_COPIED = 4 << 20


class _DifferenceError(Exception):
    """A fast path gives other numbers than a slow one."""


class _Steps:
    """What a child compares on its device: a small model, kernels, and copies."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, max_position_embeddings=256,
        )  # fmt: skip
        self.device, self._folder = device, folder
        self._model = random_reference(LlamaForCausalLM, config, 0, folder)
        self._asked = trial_requests(0)[:6]
        self._random = torch.Generator().manual_seed(0)
        torch.ones(8, 8, device=device).mm(torch.ones(8, 8, device=device)).cpu()  # loads libraries

    def plain(self) -> None:
        self._run(_ALL_TIERS)

    def attention(self) -> None:
        """Segments with and without a mask, one query and many; groups of heads in the model."""
        config = AttentionConfig(0.125)
        for dtype in self._dtypes():
            for batch, queries, keys, is_causal, has_mask in (
                (1, 70, 70, True, False), (3, 1, 130, False, False), (3, 1, 130, False, True), (1, 33, 80, False, True),
            ):  # fmt: skip
                q, k, v = (self._drawn(batch, 4, tokens, 64).to(dtype) for tokens in (queries, keys, keys))
                mask = None
                if has_mask:
                    hidden = self._drawn(batch, 1, 1, keys) > 0.5
                    hidden[..., 0] = False
                    mask = additive_mask(hidden, dtype).expand(batch, 1, queries, keys)
                found = attend(q, k, v, config, is_causal=is_causal, mask=mask)
                exact = None if mask is None else mask.float()
                expected = attend_unfused(q.float(), k.float(), v.float(), config, is_causal, exact)
                for value, known in zip(found, expected):
                    _require_close("attention", value, known, dtype)
        self._run(_RESIDENT)

    def registered(self) -> None:
        engine = CudaCopyEngine(self.device)
        values = torch.randint(256, (_COPIED,), dtype=torch.uint8, generator=self._random)
        sent, back = engine.host_memory(_COPIED).copy_(values), engine.host_memory(_COPIED).zero_()
        arrived = engine.to_device(sent)
        _require_equal("what arrives from it", arrived.cpu(), values)
        engine.to_host(arrived, back)
        _require_equal("what arrives in it", back, values)
        engine.close()

    def copies(self) -> None:
        """Copies of two threads beside products, in both directions."""
        engine, factor = CudaCopyEngine(self.device), self._drawn(1024, 1024)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(4):
                product = factor
                for _ in range(8):
                    product = (product @ factor) / 32
                given = [engine.host_memory(_COPIED).random_(generator=self._random) for _ in range(4)]
                back = pool.submit(engine.to_host, product, None, engine.launched())
                arrived = [pool.submit(engine.to_device, block) for block in given]
                for block, future in zip(given, arrived):
                    _require_equal("what arrives", future.result().cpu(), block)
                found = back.result().clone()
                _require_equal("what is stored", found, product.cpu())
        engine.close()
        self._run(_ALL_TIERS)

    def triton(self) -> None:
        """Dequantized matrices, bit by bit, and products by one row, by a tile, and by several."""
        rows, width = 192, 2048
        matrix = self._drawn(rows, width).cpu()
        bias = self._drawn(rows)
        for fmt in (cast(Any, PRECISIONS[name].weights) for name in ("4bit", "paper-4bit")):
            packed = quantize(matrix, fmt).to(self.device)
            for dtype in self._dtypes():
                found, expected = (torch.empty(rows, width, dtype=dtype, device=self.device) for _ in range(2))
                dequantize_with_torch(packed, fmt, expected)
                _require_equal("a dequantized matrix", dequantize_into(packed, fmt, found), expected)
                exact = dequantize_with_torch(packed, fmt, torch.empty(rows, width, device=self.device))
                for tokens in (1, 16, 64):
                    x = self._drawn(tokens, width).to(dtype)
                    y = quantized_matmul(x, packed, fmt, rows, bias.to(dtype))
                    if TRITON in switched_off:
                        raise _DifferenceError(switched_off[TRITON])
                    if y is not None:
                        _require_close("a product", y, x.float() @ exact.t() + bias.to(dtype).float(), dtype)

    def halves(self) -> None:
        """Products of all sizes of an evaluation, sums of one sign included, and a model in 16 bits."""
        for dtype in self._dtypes()[:-1]:
            for rows, width in ((1, 512), (16, 8192), (300, 1024)):
                x, weight = self._drawn(rows, width).abs().to(dtype), self._drawn(256, width).abs().to(dtype)
                found = torch.nn.functional.linear(x, weight)
                _require_close("a product", found, x.float() @ weight.float().t(), dtype)
        for policy in (_RESIDENT, _ALL_TIERS):
            self._run(policy, _ROUGH)

    def _dtypes(self) -> tuple[torch.dtype, ...]:
        """Types of products, float32 last."""
        has_bfloat16 = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return (torch.float16, *([torch.bfloat16] if has_bfloat16 else []), torch.float32)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self.device)

    def _run(self, policy: Policy, bound: float = _EXACT) -> None:
        """Run the small model under a policy."""
        options = EngineConfig(policy=policy, device=str(self.device), offload_dir=self._folder / "offload")
        checkpoint, link = open_checkpoint(str(self._folder)), CudaCopyEngine(self.device)
        opened = OpenedModel("", options, checkpoint, None, None, link.device, link)
        found = largest_difference(self._model, opened, self._asked, Engine)
        if not found < bound:
            raise _DifferenceError(f"differs from transformers on the host by {found:.2g} nats")


_STEPS: dict[str, Callable[[_Steps], None]] = {
    PLAIN: _Steps.plain,
    ATTENTION: _Steps.attention,
    REGISTERED: _Steps.registered,
    COPIES: _Steps.copies,
    TRITON: _Steps.triton,
    HALVES: _Steps.halves,
}


def _require_equal(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise _DifferenceError(f"{what} has wrong bits")


def _require_close(what: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = float((found.float() - expected).abs().max() / expected.abs().max())
    if not error < _RELATIVE[dtype]:
        raise _DifferenceError(
            f"{what} in {str(dtype).removeprefix('torch.')} is wrong by {error:.2g} of the largest value"
        )


def _main(name: str, names: Sequence[str], off: Sequence[str]) -> None:
    """Try paths in order; tell the parent of each that it is right, or what is wrong with it."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    switched_off.update(dict.fromkeys((*names, *off), "not tried"))
    with trial_folder() as folder, exact_products():
        steps = _Steps(torch.device(name), Path(folder))
        for path in names:
            switched_off.pop(path)
            try:
                _STEPS[path](steps)
            except _DifferenceError as error:
                told.write(f"wrong: {error}\n")
                return
            told.write("right\n")


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
