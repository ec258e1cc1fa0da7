"""A process whose CUDA device in host memory has a fault; `sitecustomize` of a test calls `start`.

Run as a program it answers requests on that device, and prints results and records as JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from typing import Any

from tests.cuda import device as fake

_kept = ExitStack()


def start() -> None:
    """Give this process the device, until it ends, with the fault that the variable FAULT names."""
    _kept.enter_context(fake.cuda_in_host_memory(is_tried=False))
    atexit.register(_kept.close)
    if fault := os.environ.get("FAULT"):
        globals()[fault]()


def wrong_kernel() -> None:
    from tests.helpers import triton_stand_in

    run = triton_stand_in.run

    def wrong(launch: Any, *arguments: Any, fused: bool) -> None:
        run(launch, *arguments, fused=fused)
        arguments[triton_stand_in.written(launch)].mul_(1.01)

    triton_stand_in.run = wrong


def crash() -> None:
    fake.KERNELS = dict.fromkeys(fake.KERNELS, lambda *_, **__: os.kill(os.getpid(), signal.SIGSEGV))


def hang() -> None:
    fake.Device.register = lambda *_: time.sleep(1e6)  # type: ignore[method-assign,assign,return-value]


def late_copy() -> None:
    """A copy beside products arrives when three more have begun, or all is waited for."""
    copy_across, synchronize = fake.Device._copy_across, fake.Device.synchronize_device
    late: list[tuple[Any, Any]] = []

    def arrive(count: int) -> None:
        while len(late) > count:
            target, values = late.pop(0)
            target.copy_(values)

    def across(self: fake.Device, target: Any, source: Any, is_async: bool) -> Any:
        stream = self.current_stream()
        if not is_async or stream == self.default_stream():
            return copy_across(self, target, source, is_async)
        values, before = fake._values(source).clone(), fake._values(target).clone()
        copy_across(self, target, source, is_async)
        fake._values(target).copy_(before)
        late.append((fake._values(target), values))
        arrive(3)
        return target

    def all_arrive(self: fake.Device, device: Any = None) -> None:
        arrive(0)
        synchronize(self, device)

    fake.Device._copy_across = across  # type: ignore[method-assign]
    fake.Device.synchronize_device = all_arrive  # type: ignore[method-assign]


def _main(folder: str, *flags: str) -> None:
    import torch

    from flexgen_helm import Engine
    from flexgen_helm.engine import device_trial
    from flexgen_helm.progress import Message, observed_by
    from tests.cuda.engine_runs import THIRDS, requests

    device_trial.TRIAL_S = 100
    messages: list[str] = []
    runs = []
    with observed_by(lambda event: messages.append(event.text) if isinstance(event, Message) else None):
        for precision, policy in (("fp16", None), ("fp16", THIRDS), ("4bit-weights", THIRDS)):
            options = {"precision": precision, "policy": policy, "unverified": "--unverified" in flags}
            with Engine.from_pretrained(folder, device="cuda", **options) as engine:
                results = engine.run(requests())
            scores = [[*(result.prompt_logprobs or ())[1:], *result.completions[0].logprobs] for result in results]
            tokens = [[*result.prompt_token_ids, *result.completions[0].token_ids] for result in results]
            runs.append({"tokens": tokens, "scores": scores, "record": engine.last_run})
    assert torch.cuda.is_available()
    print(json.dumps({"runs": runs, "messages": messages}, default=str))


if __name__ == "__main__":
    _main(*sys.argv[1:])
