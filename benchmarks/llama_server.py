"""llama.cpp's server out of the wheel `xllamacpp`, where no `llama-server` is installed; it takes that one's flags.

The wheel needs no compiler. It is built for all processors with AVX2, so a build for the machine may be faster.
"""

from __future__ import annotations

import argparse
import signal
import sys
from importlib.metadata import version

MODULE = "xllamacpp"


def main() -> None:
    """Serve until SIGTERM, with the flags of `llama-server` that the benchmark takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="store_true")
    parser.add_argument("-m")
    parser.add_argument("--host")
    for flag in ("--port", "-np", "-c", "-t"):
        parser.add_argument(flag, type=int)
    given = parser.parse_args()
    if given.version:
        sys.exit(print(f"version: {MODULE} {version(MODULE)}"))
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.hostnames, settings.port = given.m, [given.host], given.port
    settings.n_parallel, settings.n_ctx = given.np, given.c
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = given.t
    settings.cache_prompt = True
    server = xllamacpp.Server(settings)
    print(f"listening on {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in all threads that begin from here
    main()
