"""A network of given delay and rate between two network namespaces of this machine.

    namespace 0                     this process                      namespace 1
    programs -> TUN device  ->  rate, then delay, by packet  ->  TUN device -> programs

The kernel's own `netem` does the same, but many kernels come without it. Root, /dev/net/tun and Debian's iproute2 are
needed.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue

from flexgen_helm.benchmarks.network_model import Network
from flexgen_helm.errors import FlexgenError

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# Bytes of the largest packet: few packets a second, so that this process keeps up with any link.
_MTU = 60_000
# Bytes that a direction holds back before it stops reading, as a switch would.
_BUFFER_BYTES = 64 << 20
_POLL_S = 0.1


@contextmanager
def namespaces(network: Network | None) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Make two namespaces with a link between them; yield their names and their addresses.

    network: delay and rate of each direction; None for neither. Raises `FlexgenError` where this is not allowed.
    """
    names = [f"fg{os.getpid()}_{end}" for end in range(2)]  # the kernel takes 15 characters
    addresses = [f"10.77.0.{end + 1}" for end in range(2)]
    with ExitStack() as resources:
        ends = []
        for name, address in zip(names, addresses):
            _ip("netns", "add", name)
            resources.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)
            end = _open_tun(name)
            resources.callback(os.close, end)
            ends.append(end)
            _ip("link", "set", name, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "mtu", str(_MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        stop = threading.Event()
        threads = [
            thread
            for source, target in (ends, ends[::-1])
            for thread in _direction(source, target, network or Network(0.0, float("inf")), stop)
        ]
        resources.callback(_end, threads, stop)
        yield names, addresses


def why_not() -> str | None:
    """Say what keeps `namespaces` from working here; None if it works."""
    if shutil.which("ip") is None:
        return "there is no ip (Debian's iproute2)"
    try:
        with namespaces(None):
            return None
    except (FlexgenError, OSError) as error:
        return f"network namespaces and TUN devices are not allowed here ({error})"


def _open_tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(tun)
        raise
    return tun


def _direction(source: int, target: int, network: Network, stop: threading.Event) -> list[threading.Thread]:
    """Start to carry packets from one device to the other."""
    waiting: SimpleQueue[tuple[float, bytes] | None] = SimpleQueue()
    limit_s = _BUFFER_BYTES / network.bytes_s

    def receive() -> None:
        free_at = 0.0  # when the last packet has left the sender
        while not stop.is_set():
            if not select.select([source], [], [], _POLL_S)[0]:
                continue
            packet = os.read(source, _MTU + 1)
            now = time.monotonic()
            free_at = max(now, free_at) + len(packet) / network.bytes_s
            waiting.put((free_at + network.delay_s, packet))
            time.sleep(max(0.0, free_at - now - limit_s))
        waiting.put(None)

    def deliver() -> None:
        while (item := waiting.get()) is not None:
            due, packet = item
            time.sleep(max(0.0, due - time.monotonic()))
            if stop.is_set():
                return
            os.write(target, packet)

    threads = [threading.Thread(target=work, name="slow link", daemon=True) for work in (receive, deliver)]
    for thread in threads:
        thread.start()
    return threads


def _end(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    stop.set()
    for thread in threads:
        thread.join()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FlexgenError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
