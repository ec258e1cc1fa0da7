"""A CUDA device in host memory: the engine's CUDA path runs on a machine without a GPU, and every
rule is checked.

A tensor of the device is a wrapper round a tensor of the CPU that holds its values. Operations
compute at once, on the CPU; streams, events and memory are modelled beside them (`ordering`,
`memory`). So values are right whatever the code forgets, and what it forgets is found all the same:

    races            accesses that no wait, event or `record_stream` orders, between streams and
                     host threads
    mixes            operations on tensors of several devices; these raise too, as on a GPU
    syncs            places where a host thread waits for the device
    pageable_copies  copies from or to memory that is not pinned, which the driver copies through
                     buffers of its own
    kernels          launches, one for each operation of PyTorch

All but the first two count by place: 'file:line' of the package's innermost frame.

    with cuda_in_host_memory() as device:
        with Engine.from_pretrained(..., device="cuda") as engine:
            engine.run(requests)
    device.check()

What it does not model: time; 16-bit rounding of a GPU's products, and the bodies of Triton's
kernels. They are planned and launched as on a GPU, and a stand-in computes by plain PyTorch.
"""

from __future__ import annotations

import _thread
import mmap
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import flexgen_helm
from tests.cuda.memory import Allocator, Block
from tests.cuda.ordering import Access, Ordering, Recording, TrackedLock, TrackedRLock
from tests.helpers.fused_attention import KERNELS

GIB = 1 << 30
_PACKAGE = str(Path(flexgen_helm.__file__).parent) + "/"
# Locks that only guard counters order no data: what they order by chance would hide races.
_COUNTING = ("offload/ledger.py", "offload/transfer_stats.py")
# Operations whose result depends on values: the host waits for them.
_WAITING = {
    "aten::nonzero", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::masked_select", "aten::equal", "aten::_local_scalar_dense",
    "aten::is_nonzero", "aten::bincount",
}  # fmt: skip
_INDEXING = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}


class DeviceMixError(RuntimeError):
    """Tensors of several devices met in an operation."""


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device=None, priority=0, *, name="stream"):
        self._world = _world()
        self.device = torch.device("cuda", self._world.index_of(device))
        self.actor = self._world.ordering.new_actor(f"{name} of {self.device}")
        self._world.streams.append(self)

    def wait_event(self, event):
        ordering = self._world.ordering
        ordering.join(self.actor, ordering.snapshot(ordering.thread()))
        ordering.join(self.actor, ordering.certain(event.recordings))

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        self._world.synchronize(self)

    def __eq__(self, other):
        return isinstance(other, Stream) and other.actor == self.actor

    def __hash__(self):
        return hash(self.actor)


class Event:
    """`torch.cuda.Event`. A wait counts for the latest recording that surely came before it."""

    def __init__(self, *_, **__):
        self.recordings: list[Recording] = []

    def record(self, stream=None):
        world = _world()
        stream = stream or world.current_stream()
        self.recordings.append(world.ordering.record(stream.actor))
        del self.recordings[:-4096]

    def wait(self, stream=None):
        (stream or _world().current_stream()).wait_event(self)

    def synchronize(self):
        world = _world()
        world.count(world.syncs)
        world.ordering.wait_for(world.ordering.certain(self.recordings))


class CudaTensor(Tensor):
    """A tensor of the device: `values` on the CPU, in a block of the device's memory."""

    values: Tensor
    block: Block

    @staticmethod
    def __new__(cls, values, block, device):
        made = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, layout=values.layout, device=device, requires_grad=False,
        )  # fmt: skip
        made.values, made.block = values, block
        return made

    def __repr__(self):
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def record_stream(self, stream):
        self.block.users.add(stream.actor)

    @property
    def span(self):
        """First byte and end, within the device's memory; views with gaps span them."""
        if not self.values.numel():
            return 0, 0
        first = self.values.storage_offset()
        last = first + sum(
            (n - 1) * abs(step) for n, step in zip(self.values.shape, self.values.stride())
        )
        size, origin = self.values.element_size(), self.block.start
        return origin + first * size, origin + (last + 1) * size

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name == "tolist":
            _world().synchronize()
            return args[0].values.tolist()
        if name in ("numpy", "__array__"):
            raise TypeError(
                f"can't convert {args[0].device} device type tensor to numpy. Use Tensor.cpu() "
                "first"
            )
        if name == "data_ptr":
            return args[0].span[0]
        if name == "is_pinned":
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _world().dispatch(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Sees the operations of one thread that make tensors of the device, and those on watched host
    memory.
    """

    def __init__(self, world):
        super().__init__()
        self._world = world

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if _device is not self._world:  # a thread that outlives its test
            return func(*args, **(kwargs or {}))
        return self._world.dispatch(func, args, kwargs or {})


@contextmanager
def _on_stream(stream):
    """`torch.cuda.stream`."""
    if stream is None:
        yield
        return
    world = _world()
    before = world.current_stream(stream.device)
    with _on_device(stream.device):
        world.set_stream(stream)
        try:
            yield
        finally:
            _world().set_stream(before)


@contextmanager
def _on_device(device):
    """`torch.cuda.device`."""
    world = _world()
    before = world.current_device()
    if device is not None:
        world.set_device(device)
    try:
        yield
    finally:
        _world().set_device(before)


class _Runtime:
    """What the engine calls of `torch.cuda.cudart()`."""

    @staticmethod
    def cudaHostRegister(address, size, flags):
        return _world().register(address, size)

    @staticmethod
    def cudaHostUnregister(address):
        return _world().unregister(address)


class Device:
    """One machine's CUDA devices; see the module."""

    def __init__(self, num_devices, memory):
        self.ordering = Ordering(_text)
        self.mixes: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.pageable_copies: Counter[str] = Counter()
        self.streams: list[Stream] = []
        self.memory = [
            Allocator(self.ordering, memory, (1 + index) << 44) for index in range(num_devices)
        ]
        self.register_error = 0
        self.registered_from: set[int] = set()  # devices that were current then
        # Pinned host memory: address -> size. Registered pages, and those that the driver
        # allocated.
        self.registered: dict[int, int] = {}
        self.peak_registered = 0
        # Host memory whose accesses are checked: storage -> a reference that keeps its number from
        # being used again.
        self._watched: dict[int, tuple[StorageWeakRef, list[Access]]] = {}
        self._own = threading.local()
        self._defaults: list[Stream] = []

    @property
    def races(self):
        return self.ordering.races

    def check(self):
        """Assert that no race and no mix was seen."""
        shown = [
            f"{count} x {one}\n      | {other}" for (one, other), count in self.races.most_common(8)
        ]
        assert not self.races, f"{len(self.races)} pairs that nothing orders:\n  " + "\n  ".join(
            shown
        )
        assert not self.mixes, f"tensors of several devices: {dict(self.mixes)}"

    # What torch.cuda offers

    def index_of(self, device=None):
        if device is None:
            return self.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        index = self.current_device() if index is None else index
        if index >= len(self.memory):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    def current_device(self):
        return getattr(self._own, "device", 0)

    def set_device(self, device):
        self._own.device = self.index_of(device)

    def default_stream(self, device=None):
        with self.ordering.lock:
            while len(self._defaults) < len(self.memory):
                self._defaults.append(Stream(len(self._defaults), name="default stream"))
        return self._defaults[self.index_of(device)]

    def current_stream(self, device=None):
        streams: dict[int, Stream] = self._own.__dict__.setdefault("streams", {})
        index = self.index_of(device)
        return streams.get(index) or self.default_stream(index)

    def set_stream(self, stream):
        self._own.__dict__.setdefault("streams", {})[stream.device.index] = stream

    def synchronize(self, stream=None):
        """Wait for a stream; None: the current one."""
        self.count(self.syncs)
        self._wait_for(stream or self.current_stream())

    def _wait_for(self, stream):
        self.ordering.wait_for(self.ordering.snapshot(stream.actor))

    def synchronize_device(self, device=None):
        self.count(self.syncs)
        index = self.index_of(device)
        for stream in self.streams:
            if stream.device.index == index:
                self._wait_for(stream)

    def mem_get_info(self, device=None):
        memory = self.memory[self.index_of(device)]
        return memory.total - memory.in_use, memory.total

    def limit(self, fraction, device=None):
        assert 0 <= fraction <= 1
        memory = self.memory[self.index_of(device)]
        memory.allowed = int(fraction * memory.total)

    # Host memory

    def register(self, address, size):
        if self.register_error or address % mmap.PAGESIZE:
            self._own.last_error = self.register_error or 1
            return self._own.last_error
        self.registered_from.add(self.current_device())
        with self.ordering.lock:
            self.registered[address] = size
            self.peak_registered = max(self.peak_registered, sum(self.registered.values()))
        return 0

    def unregister(self, address):
        return 0 if self.registered.pop(address, None) is not None else 1

    def is_pinned(self, tensor):
        if tensor.is_cuda or not tensor.numel():
            return False
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in list(self.registered.items()))

    def note_host(self, tensor, writes, what):
        """Note that the calling thread reads or writes host memory by other means than PyTorch."""
        self._watch(tensor)
        self.ordering.step(self.ordering.thread())
        self._access_host(tensor, self.ordering.thread(), writes, what, _trail())

    def _pinned_memory(self, shape, dtype):
        """`torch.empty(..., pin_memory=True)`."""
        num_bytes = prod(shape) * dtype.itemsize
        pages = mmap.mmap(-1, max(1, num_bytes))
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        self.registered[memory.data_ptr()] = num_bytes
        weakref.finalize(pages, self.registered.pop, memory.data_ptr(), None)
        self._watch(memory)
        return memory[:num_bytes].view(dtype).view(list(shape))

    def _watch(self, tensor):
        storage = tensor.untyped_storage()
        with self.ordering.lock:
            if storage._cdata not in self._watched:
                self._watched = {
                    key: own for key, own in self._watched.items() if not own[0].expired()
                }
                self._watched[storage._cdata] = StorageWeakRef(storage), []

    def _is_watched(self, tensor):
        return tensor.untyped_storage()._cdata in self._watched

    def _access_host(self, tensor, actor, writes, what, trail):
        if not tensor.numel():
            return
        _, accesses = self._watched[tensor.untyped_storage()._cdata]
        size = tensor.element_size()
        first = tensor.storage_offset()
        last = first + sum((n - 1) * abs(step) for n, step in zip(tensor.shape, tensor.stride()))
        self.ordering.access(accesses, first * size, (last + 1) * size, actor, writes, what, trail)

    # Operations

    def count(self, counter):
        place = _text(_trail(1))
        with self.ordering.lock:
            counter[place] += 1

    def new_tensor(self, values, device):
        """Allocate memory for values that were just computed on the current stream."""
        index = self.index_of(device)
        block = self.memory[index].allocate(
            values.untyped_storage().nbytes(), self.current_stream(index).actor
        )
        return CudaTensor(values, block, torch.device("cuda", index))

    def launch(self, what, device, reads, writes):
        """Run one kernel or copy on the device's current stream; a kernel reports this thread's
        last error.
        """
        if not what.startswith("copy ") and (error := self._own.__dict__.pop("last_error", 0)):
            raise RuntimeError(f"CUDA error: {'out of memory' if error == 2 else error}")
        self.count(self.kernels)
        stream, trail = self.current_stream(device).actor, _trail()
        with self.ordering.lock:
            self.ordering.launch(stream)
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    first, end = tensor.span
                    # The package keeps small tensors for good: those of a test before this one have
                    # no clocks here.
                    if end > first and tensor.block.allocator.ordering is self.ordering:
                        self.ordering.access(
                            tensor.block.accesses, first, end, stream, is_write, what, trail
                        )

    def dispatch(self, func, args, kwargs):
        name = func._schema.name
        tensors = list(_tensors((args, tuple(kwargs.values()))))
        on_device = [x for x in tensors if isinstance(x, CudaTensor)]
        device = kwargs.get("device")
        kind = None if device is None else torch.device(device).type
        if not on_device and kind != "cuda":
            return self._on_host(name, func, tensors, args, kwargs)
        if name == "aten::_to_copy":
            return self._to_copy(func, args[0], kwargs, kind)
        if name == "aten::copy_" and not all(isinstance(x, CudaTensor) for x in tensors):
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            return self._copy_across(args[0], args[1], is_async)
        if not on_device:
            if tensors and "_like" not in name:
                self._mix(name)
            kwargs = {**kwargs, "device": torch.device("cpu")}
            kwargs.pop("pin_memory", None)
            made = self.new_tensor(func(*args, **kwargs), device)
            if "empty" not in name:
                self.launch(name, device, [], [made])
            return made
        self._check_devices(name, args, tensors, on_device)
        return self._compute(name, func, args, kwargs, on_device)

    def _on_host(self, name, func, tensors, args, kwargs):
        if kwargs.get("pin_memory"):
            with _disable_current_modes():
                return self._pinned_memory(
                    args[0], kwargs.get("dtype") or torch.get_default_dtype()
                )
        if name == "aten::is_pinned":
            return self.is_pinned(tensors[0])
        if self._watched and any(map(self._is_watched, tensors)) and not _is_view(func):
            reads, writes = _operands(func, args, kwargs)
            thread, trail = self.ordering.thread(), _trail()
            self.ordering.step(thread)
            for tensor in writes:
                # what is copied out of pinned memory is read by other threads later
                self._watch(tensor)
            for operands, is_write in ((reads, False), (writes, True)):
                for tensor in operands:
                    if self._is_watched(tensor):
                        self._access_host(tensor, thread, is_write, name, trail)
        return func(*args, **kwargs)

    def _to_copy(self, func, source, kwargs, kind):
        options = {
            k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")
        }
        if isinstance(source, CudaTensor):
            if kind == "cpu":
                self.launch("copy to the host", source.device, [source], [])
                self.count(self.pageable_copies)
                self.synchronize(self.current_stream(source.device))
                return func(source.values, **options)
            made = self.new_tensor(
                func(source.values, **options).clone(), kwargs.get("device") or source.device
            )
            self.launch("aten::_to_copy", source.device, [source], [made])
            return made
        made = self.new_tensor(func(source, **options).clone(), kwargs["device"])
        self._send(source, made, kwargs.get("non_blocking", False))
        return made

    def _copy_across(self, target, source, is_async):
        _values(target).copy_(_values(source))
        if isinstance(target, CudaTensor):
            self._send(source, target, is_async)
            return target
        assert isinstance(source, CudaTensor)
        self.launch("copy to the host", source.device, [source], [])
        stream = self.current_stream(source.device)
        self._watch(target)
        pinned, trail = self.is_pinned(target), _trail()
        if not pinned:
            self.count(self.pageable_copies)
        self._access_host(target, stream.actor, True, "copy to the host", trail)
        if not (is_async and pinned):
            self.synchronize(stream)
        return target

    def _send(self, source, target, is_async):
        """Copy host memory to the device, on its current stream."""
        self.launch("copy to the device", target.device, [], [target])
        stream = self.current_stream(target.device)
        if not source.dim() and source.numel() == 1 and not self._is_watched(source):
            return  # a number is an argument of the kernel
        self._watch(source)
        pinned = self.is_pinned(source)
        if pinned:
            self._access_host(source, stream.actor, False, "copy to the device", _trail())
        else:  # the driver has read it when the call returns
            self.count(self.pageable_copies)
            self.ordering.step(self.ordering.thread())
            self._access_host(source, self.ordering.thread(), False, "copy to the device", _trail())
        if not is_async:
            self.synchronize(stream)

    def _check_devices(self, name, args, tensors, on_device):
        if len({x.device for x in on_device}) > 1:
            self._mix(name)
        for tensor in tensors:
            if isinstance(tensor, CudaTensor):
                continue
            is_value = len(args) > 2 and tensor is args[2]
            if name in _INDEXING and is_value and not tensor.dim():
                continue  # PyTorch takes a number of the host as what is put there
            if name in _INDEXING and tensor is not args[0] and not is_value:
                self.count(self.pageable_copies)  # an index of the host is copied for every use
                self.synchronize(self.current_stream(on_device[0].device))
            elif tensor.dim() or name in _INDEXING | {
                "aten::cat",
                "aten::gather",
                "aten::index_select",
            }:
                self._mix(f"{name} of {tuple(tensor.shape)} {tensor.dtype} on the host")

    def _mix(self, what):
        place = f"{what} at {_text(_trail())}"
        with self.ordering.lock:
            self.mixes[place] += 1
        raise DeviceMixError(f"Expected all tensors to be on the same device: {place}")

    def _compute(self, name, func, args, kwargs, on_device):
        device = on_device[0].device
        is_masked = name in _INDEXING and any(
            x.dtype in (torch.bool, torch.uint8) for x in _tensors((args[1],))
        )
        if name in _WAITING or is_masked:
            self.synchronize(self.current_stream(device))
        values = {key: _values(value) for key, value in kwargs.items()}
        if "device" in values:
            if torch.device(values["device"]).type == "cpu":
                self._mix(f"{name} for the host")
            values["device"] = torch.device("cpu")
        reads, writes = _operands(func, args, kwargs)
        out = KERNELS.get(name, func)(*_values(args), **values)
        storages = {x.values.untyped_storage()._cdata: x for x in reversed(on_device)}
        made: list[CudaTensor] = []

        result = self._wrapped(out, on_device, storages, made)
        is_empty = name.startswith(("aten::empty", "aten::new_empty"))
        if (writes or made or name in _WAITING) and not is_empty:
            self.launch(
                name, device, [x for x in reads if isinstance(x, CudaTensor)], [*writes, *made]
            )
        return result

    def _wrapped(
        self,
        value,
        operands,
        storages,
        made,
    ):
        """Wrap an operation's result: an operand itself, a view of one, or a new tensor, which
        `made` gets.
        """
        # No function within a function, which would keep the operands until the collector runs.
        if isinstance(value, list | tuple):
            return type(value)(self._wrapped(one, operands, storages, made) for one in value)
        if not isinstance(value, Tensor):
            return value
        for own in operands:
            if own.values is value:
                return own
        base = storages.get(value.untyped_storage()._cdata)
        if base is not None:
            return CudaTensor(value, base.block, base.device)
        made.append(self.new_tensor(value, operands[0].device))
        return made[-1]


def _tensors(values):
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _values(value):
    """Replace tensors of the device by their values."""
    if isinstance(value, CudaTensor):
        return value.values
    if isinstance(value, list | tuple):
        return type(value)(map(_values, value))
    return value


def _is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _operands(func, args, kwargs):
    """Return the tensors that an operation reads, and those that it writes."""
    reads: list[Any] = []
    writes: list[Any] = []
    overwrites = func._schema.name in ("aten::copy_", "aten::fill_", "aten::zero_")
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        tensors = list(_tensors((value,)))
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
            if overwrites or argument.name == "out":
                continue
        reads += tensors
    return reads, writes


def _trail(depth=3):
    """Return the innermost places of the package that led here."""
    frame, trail = sys._getframe(1), []
    while frame is not None and len(trail) < depth:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            trail.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(trail)


def _text(trail):
    return " < ".join(f"{file.removeprefix(_PACKAGE)}:{line}" for file, line in trail) or "a test"


_device: Device | None = None


def _world():
    assert _device is not None, "the device is gone: its test is over"
    return _device


def _launch_triton(launch, *arguments):
    """Stand in for a launch of Triton; needs the kernel's device to be the current one."""
    from tests.helpers import triton_stand_in

    world = _world()
    tensors = [x for x in arguments if isinstance(x, CudaTensor)]
    if len(tensors) < len([*_tensors(arguments)]) or any(
        x.device.index != world.current_device() for x in tensors
    ):
        world._mix("a kernel of Triton on another device than the current one")
    target = arguments[1]
    triton_stand_in.run(launch, *_values(arguments))
    world.launch(
        launch.kernel.__name__, target.device, [x for x in tensors if x is not target], [target]
    )


def _patch(patch, world, is_proved):
    ordering = world.ordering

    def own_threads(patch):
        run, join, submit = threading.Thread.run, threading.Thread.join, ThreadPoolExecutor.submit
        start = threading.Thread.start

        def started(self):
            self._clock_at_start = ordering.snapshot(ordering.thread())
            start(self)

        def run_in_mode(self):
            ordering.name_thread(self.name)
            ordering.join(ordering.thread(), getattr(self, "_clock_at_start", {}))
            try:
                with _Mode(world):
                    run(self)
            finally:
                self._clock_at_end = ordering.snapshot(ordering.thread())

        def joined(self, timeout=None):
            join(self, timeout)
            ordering.join(ordering.thread(), getattr(self, "_clock_at_end", {}))

        def submitted(self, task, /, *args, **kwargs):
            clock = ordering.snapshot(ordering.thread())

            def ordered(*args, **kwargs):
                ordering.join(ordering.thread(), clock)
                return task(*args, **kwargs)

            return submit(self, ordered, *args, **kwargs)

        patch.setattr(threading.Thread, "start", started)
        patch.setattr(threading.Thread, "run", run_in_mode)
        patch.setattr(threading.Thread, "join", joined)
        patch.setattr(ThreadPoolExecutor, "submit", submitted)
        made = ThreadPoolExecutor.__init__

        def made_without(self, *args, **kwargs):
            made(self, *args, **kwargs)
            # orders idle threads by chance
            self._idle_semaphore._cond = threading.Condition(_thread.allocate_lock())

        patch.setattr(ThreadPoolExecutor, "__init__", made_without)

    def own_locks(patch):
        def lock():
            counts = sys._getframe(1).f_code.co_filename.endswith(_COUNTING)
            return (
                _thread.allocate_lock()
                if counts
                else TrackedLock(ordering, _thread.allocate_lock())
            )

        patch.setattr(threading, "Lock", lock)
        patch.setattr(threading, "RLock", lambda: TrackedRLock(ordering, _thread.RLock()))

    def torch_cuda(patch):
        class Properties:
            name, total_memory = "CUDA in host memory", world.memory[0].total

        replaced: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(world.memory),
            "current_device": world.current_device,
            "set_device": world.set_device,
            "device": _on_device,
            "Stream": Stream,
            "Event": Event,
            "stream": _on_stream,
            "current_stream": world.current_stream,
            "synchronize": world.synchronize_device,
            "mem_get_info": world.mem_get_info,
            "empty_cache": lambda: None,
            "set_per_process_memory_fraction": world.limit,
            "cudart": lambda: _Runtime,
            "get_device_name": lambda device=None: Properties.name,
            "get_device_properties": lambda device=None: Properties,
            "get_device_capability": lambda device=None: (8, 0),
            # of test_gpu_runs.py, which `make gpu-check FAKE=1` tries out
            "_sleep": lambda cycles: None,
        }
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Tensor, "is_pinned", lambda tensor, device=None: world.is_pinned(tensor))

    def package(patch):
        from flexgen_helm.engine import engine, kernel_checks, proof
        from flexgen_helm.models import attention
        from flexgen_helm.offload import disk, transfer_manager

        for function in (
            attention.device_kernel,
            proof._device_text,
            kernel_checks._dequantizes_alike,
            kernel_checks._attention_fault,
        ):
            function.cache_clear()  # what an earlier device was like
        if is_proved:
            patch.setattr(engine, "require_proof", lambda *_: True)
            patch.setattr(engine, "compare_kernels", lambda *_: None)
        with suppress(ImportError):  # a machine without Triton
            from flexgen_helm.quant import triton_launches

            patch.setattr(triton_launches.Launch, "run", _launch_triton)

        transfer = disk.DirectFile._transfer

        def noted(self, is_write, offset, buffer):
            world.note_host(buffer, not is_write, "file I/O")
            transfer(self, is_write, offset, buffer)

        made = transfer_manager.TransferManager.__init__

        def made_without(self, *args, **kwargs):
            made(self, *args, **kwargs)
            # it counts bytes, as those of `_COUNTING`
            self._store_done = threading.Condition(_thread.RLock())

        patch.setattr(transfer_manager.TransferManager, "__init__", made_without)
        patch.setattr(disk.DirectFile, "_transfer", noted)

    for part in (own_threads, own_locks, torch_cuda, package):
        part(patch)


@contextmanager
def cuda_in_host_memory(num_devices=1, memory=4 * GIB, is_proved=True):
    """Give this process CUDA devices of `memory` bytes each, until the block ends; all patches are
    taken back.

    is_proved: the engine computes without proving itself.
    """
    global _device
    assert _device is None, "one machine at a time"
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, as FakeTensorMode uses it
    lifted = torch._C._only_lift_cpu_tensors()
    world = _device = Device(num_devices, memory)
    try:
        with pytest.MonkeyPatch.context() as patch:
            _patch(patch, world, is_proved)
            # torch.tensor(list, device="cuda") copies from the host
            torch._C._set_only_lift_cpu_tensors(True)
            with _Mode(world):
                yield world
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
        _device = None
