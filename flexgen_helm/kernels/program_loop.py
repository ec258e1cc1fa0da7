"""Calls of compiled functions one behind the other, compiled (`run_calls`)."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from flexgen_helm.kernels.emit import INT64, emitted, get_integer, int64


@emitted
def _call_function(typing_context: Any, address: Any, argument: Any) -> Any:
    """Call the compiled function at an address with the address of its numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        pointer = INT64.as_pointer()
        function = builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(function, [builder.inttoptr(arguments[1], pointer)])

    return types.void(int64, int64), generate


@emitted
def _call(typing_context: Any, address: Any) -> Any:
    """Call the function without arguments at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        builder.call(builder.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])

    return types.void(int64), generate


def run_calls(address: Any) -> None:
    """Call functions one behind the other on each thread; all threads have ended one before any begins the next.

    Arguments: a table with the address of each function and of its numbers, the calls, and the address of OpenMP's
    barrier, 0 for one thread.
    """
    data = numba.carray(address, 7, np.int64)
    table, count, barrier = data[4], data[5], data[6]
    for number in range(count):
        _call_function(get_integer(table + 16 * number), get_integer(table + 16 * number + 8))
        if barrier != 0 and number + 1 < count:
            _call(barrier)
