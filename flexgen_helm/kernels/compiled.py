"""The compiled functions themselves, by numba and parts of LLVM's language that Python cannot say.

All are in this file, because numba keeps what it compiled until the file of the function changes.
A function gets one address: of 64-bit numbers that `team.run_on_threads` writes, its header and then the arguments.
Addresses and distances between rows are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import chain, product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from flexgen_helm.kernels.processor import CONVERTS_HALVES, HAS_AVX512, LANES

_INT64, _INT32, _INT16, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()
_int64 = types.int64
# numba passes the first argument of an intrinsic, its typing context, itself.
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic


# Rows of x and of the weight in one tile of `few_rows`: its sums, and what they are made of, stay in registers.
TILE_ROWS, TILE_OUTPUTS = (4, 4) if HAS_AVX512 else (2, 4)

_VECTOR = ir.VectorType(_FLOAT, LANES)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, in one instruction where the processor has it."""
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _load(builder: Any, address: Any, kind: Any, alignment: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = alignment
    return value


def _store(builder: Any, value: Any, address: Any, alignment: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = alignment


def _widen(builder: Any, address: Any, is_bfloat16: bool) -> Any:
    """Load a vector of 16-bit numbers as float32."""
    if not is_bfloat16:
        return builder.fpext(_load(builder, address, ir.VectorType(ir.HalfType(), LANES), 2), _VECTOR)
    wide = ir.VectorType(_INT32, LANES)
    bits = builder.zext(_load(builder, address, ir.VectorType(_INT16, LANES), 2), wide)
    return builder.bitcast(builder.shl(bits, ir.Constant(wide, [16] * LANES)), _VECTOR)


def _total(builder: Any, vector: Any) -> Any:
    """The sum of a vector's elements, in any order."""
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    return builder.call(function, [ir.Constant(_FLOAT, 0.0), vector], fastmath=("reassoc",))


@_intrinsic
def _call(typing_context: Any, address: Any) -> Any:
    """Call the function without arguments at an address; it returns 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], ir.FunctionType(_INT32, []).as_pointer()), [])

    return types.int32(_int64), generate


@numba.njit
def _part(data: Any) -> tuple[Any, Any]:
    """This thread's part of the work, and how many parts there are."""
    if data[0] == 0:
        return data[2], data[3]
    return np.int64(_call(data[0])), np.int64(_call(data[1]))


def _tile(builder: Any, rows: int, outputs: int, is_bfloat16: bool, arguments: Any) -> None:
    """Emit the product of some rows of x with some rows of a 16-bit matrix: y[i, j] = x[i] · w[j]."""
    x, x_row, w, w_row, width, y, y_row = arguments
    x_rows = [builder.add(x, builder.mul(x_row, _INT64(i))) for i in range(rows)]
    w_rows = [builder.add(w, builder.mul(w_row, _INT64(j))) for j in range(outputs)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    column = builder.phi(_INT64)
    column.add_incoming(_INT64(0), before)
    sums = [[builder.phi(_VECTOR) for _ in range(outputs)] for _ in range(rows)]
    in_16_bits, in_32_bits = builder.mul(column, _INT64(2)), builder.mul(column, _INT64(4))
    weights = [_widen(builder, builder.add(row, in_16_bits), is_bfloat16) for row in w_rows]
    values = [_load(builder, builder.add(row, in_32_bits), _VECTOR, 4) for row in x_rows]
    results = [[_multiply_add(builder, value, weight, one) for weight, one in zip(weights, own)]
               for value, own in zip(values, sums)]  # fmt: skip
    for one, result in zip(chain(*sums), chain(*results)):
        one.add_incoming(ir.Constant(_VECTOR, [0.0] * LANES), before)
        one.add_incoming(result, loop)
    following = builder.add(column, _INT64(LANES))
    column.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, width), loop, behind)
    builder.position_at_end(behind)
    for i, own in enumerate(results):
        row = builder.add(y, builder.mul(y_row, _INT64(i)))
        for j, result in enumerate(own):
            _store(builder, _total(builder, result), builder.add(row, _INT64(4 * j)), 4)


@_intrinsic
def _product(
    typing: Any, kind: Any, rows: Any, outputs: Any, x: Any, x_row: Any, w: Any, w_row: Any, width: Any, y: Any, to: Any
) -> Any:  # fmt: skip
    """A tile of up to `TILE_ROWS` rows and 1 or `TILE_OUTPUTS` outputs; kind: 1 for bfloat16, 0 for float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, operands = arguments[:3], arguments[3:]
        kinds = (0, 1) if CONVERTS_HALVES else (1,)
        for case in product(kinds, range(1, TILE_ROWS + 1), (1, TILE_OUTPUTS)):
            equal = [builder.icmp_signed("==", own, _INT64(number)) for own, number in zip(given, case)]
            with builder.if_then(builder.and_(builder.and_(*equal[:2]), equal[2])):
                _tile(builder, case[1], case[2], bool(case[0]), operands)

    return types.void(*[_int64] * 10), generate


def few_rows(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and w [outputs, width] in 16 bits.

    Arguments: kind of w (`_product`), x, bytes of its rows, w, bytes of its rows, y, bytes of its rows, T, outputs,
    width (whole vectors).
    """
    data = numba.carray(address, 14, np.int64)
    kind, x, x_row, w, w_row = data[4], data[5], data[6], data[7], data[8]
    y, y_row, count, outputs, width = data[9], data[10], data[11], data[12], data[13]
    part, parts = _part(data)
    tiles = (outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    first, last = tiles * part // parts, tiles * (part + 1) // parts
    for output in range(first * TILE_OUTPUTS, min(last * TILE_OUTPUTS, outputs), TILE_OUTPUTS):
        step = TILE_OUTPUTS if output + TILE_OUTPUTS <= outputs else 1
        for row in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - row)
            for own in range(output, min(output + TILE_OUTPUTS, outputs), step):
                target = y + row * y_row + 4 * own
                x_at, w_at = x + row * x_row, w + own * w_row
                _product(kind, rows, step, x_at, x_row, w_at, w_row, width, target, y_row)


# --- Attention ---
# Queries of a tile, in vectors, and keys (of the scores) or elements (of the output) of one step of a product: the sums
# stay in registers. Keys of a block: its scores stay in the first cache.
_QUERY_VECTORS, _STEP_ROWS = (3, 8) if HAS_AVX512 else (3, 4)
TILE_QUERIES, BLOCK_KEYS = _QUERY_VECTORS * LANES, 64
# A tile also has a row each for maxima, sums and two bounds of what is seen, and two rows for 64-bit addresses.
_TILE_ROWS_BESIDE = 6


def scratch_floats(head_dim: int) -> int:
    """Numbers of 32 bits that a thread needs."""
    return TILE_QUERIES * (2 * head_dim + BLOCK_KEYS + _TILE_ROWS_BESIDE)


def _emit_step(builder: Any, rows: int, vectors: int, arguments: Any) -> None:
    """Emit c [rows, vectors] = or += a [rows, count] b [count, vectors]; a has any distances, b and c whole tiles."""
    a, a_row, a_column, b, count, c, adds = arguments
    tile_bytes = 4 * TILE_QUERIES
    targets = [[builder.add(c, _INT64(i * tile_bytes + 4 * LANES * j)) for j in range(vectors)] for i in range(rows)]
    zero, keeps = ir.Constant(_VECTOR, [0.0] * LANES), builder.icmp_signed("!=", adds, _INT64(0))
    starts = [[builder.select(keeps, _load(builder, at, _VECTOR, 4), zero) for at in own] for own in targets]
    a_rows = [builder.add(a, builder.mul(a_row, _INT64(i))) for i in range(rows)]
    before, loop, behind = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, b_at, a_at = builder.phi(_INT64), builder.phi(_INT64), builder.phi(_INT64)
    sums = [[builder.phi(_VECTOR) for _ in range(vectors)] for _ in range(rows)]
    values = [_load(builder, builder.add(b_at, _INT64(4 * LANES * j)), _VECTOR, 4) for j in range(vectors)]
    results = []
    for row, own in zip(a_rows, sums):
        factor = _spread(builder, _load(builder, builder.add(row, a_at), _FLOAT, 4))
        results.append([_multiply_add(builder, factor, value, one) for value, one in zip(values, own)])
    for one, start, result in zip(chain(*sums), chain(*starts), chain(*results)):
        one.add_incoming(start, before)
        one.add_incoming(result, loop)
    following = builder.add(number, _INT64(1))
    for phi, start, result in (
        (number, _INT64(0), following),
        (b_at, b, builder.add(b_at, _INT64(tile_bytes))),
        (a_at, _INT64(0), builder.add(a_at, a_column)),
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(result, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, behind)
    builder.position_at_end(behind)
    for at, result in zip(chain(*targets), chain(*results)):
        _store(builder, result, at, 4)


@_intrinsic
def _step(
    typing: Any, rows: Any, vectors: Any, a: Any, a_row: Any, a_column: Any, b: Any, count: Any, c: Any, adds: Any
) -> Any:
    """A product of 1 or `_STEP_ROWS` rows with up to `_QUERY_VECTORS` vectors of queries."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        given, operands = arguments[:2], arguments[2:]
        for case in product((1, _STEP_ROWS), range(1, _QUERY_VECTORS + 1)):
            equal = [builder.icmp_signed("==", own, _INT64(number)) for own, number in zip(given, case)]
            with builder.if_then(builder.and_(*equal)):
                _emit_step(builder, *case, operands)

    return types.void(*[_int64] * 9), generate


def _spread(builder: Any, value: Any) -> Any:
    """A vector whose elements are all one value."""
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    zeros = ir.Constant(ir.VectorType(_INT32, LANES), [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, value, _INT32(0)), undefined, zeros)


def _constant(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _exp(builder: Any, x: Any) -> Any:
    """e^x for x <= 0 to about one unit in the last place; 0 below -87 (Moshier, Cephes: `expf`)."""
    name = f"llvm.floor.v{LANES}f32"
    kind = ir.FunctionType(_VECTOR, [_VECTOR])
    floor = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    power = builder.call(floor, [_multiply_add(builder, x, _constant(1.4426950408889634), _constant(0.5))])
    rest = _multiply_add(builder, power, _constant(-0.693359375), x)
    rest = _multiply_add(builder, power, _constant(2.12194440e-4), rest)
    value = _constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0):
        value = _multiply_add(builder, value, rest, _constant(factor))
    integers = ir.VectorType(_INT32, LANES)
    exponent = builder.add(builder.fptosi(power, integers), ir.Constant(integers, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(integers, [23] * LANES)), _VECTOR)
    is_least = builder.fcmp_ordered("<", x, _constant(-87.0))
    return builder.select(is_least, _constant(0.0), builder.fmul(value, scale))


@_intrinsic
def _softmax(
    typing: Any, vectors: Any, scores: Any, count: Any, first: Any, bounds: Any, maximum: Any, outputs: Any, size: Any
) -> Any:
    """Turn the scores of a block [count, queries] into weights, and scale what was summed before to the new maximum.

    first: number of the block's first key; bounds: addresses of the first key that each query sees, and of the one
    behind the last, or 0 where all are seen. maximum: address of the maxima, followed by the sums. outputs [size,
    queries].
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        vectors, scores, count, first, bounds, maximum, outputs, size = arguments
        tile_bytes = _INT64(4 * TILE_QUERIES)
        integers = ir.VectorType(_INT32, LANES)
        kept = [cgutils.alloca_once(builder, _VECTOR) for _ in range(2)]
        is_masked = builder.icmp_signed("!=", bounds, _INT64(0))
        with cgutils.for_range(builder, vectors) as column:
            offset = builder.mul(column.index, _INT64(4 * LANES))
            at_maximum, own = builder.add(maximum, offset), builder.add(scores, offset)
            at_sum = builder.add(at_maximum, tile_bytes)
            with builder.if_then(is_masked):
                low = _load(builder, builder.add(bounds, offset), integers, 4)
                high = _load(builder, builder.add(builder.add(bounds, offset), tile_bytes), integers, 4)
                with cgutils.for_range(builder, count) as key:
                    at = builder.add(own, builder.mul(key.index, tile_bytes))
                    numbers = _spread(builder, builder.trunc(builder.add(first, key.index), _INT32))
                    sees = builder.and_(
                        builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<", numbers, high)
                    )
                    score = builder.select(sees, _load(builder, at, _VECTOR, 4), _constant(float("-inf")))
                    _store(builder, score, at, 4)
            before = _load(builder, at_maximum, _VECTOR, 4)
            builder.store(before, kept[0])
            with cgutils.for_range(builder, count) as key:
                score = _load(builder, builder.add(own, builder.mul(key.index, tile_bytes)), _VECTOR, 4)
                largest = builder.load(kept[0])
                builder.store(builder.select(builder.fcmp_ordered(">", score, largest), score, largest), kept[0])
            largest = builder.load(kept[0])
            shrinking = _exp(builder, builder.fsub(before, largest))
            builder.store(builder.fmul(_load(builder, at_sum, _VECTOR, 4), shrinking), kept[1])
            with cgutils.for_range(builder, count) as key:
                at = builder.add(own, builder.mul(key.index, tile_bytes))
                weight = _exp(builder, builder.fsub(_load(builder, at, _VECTOR, 4), largest))
                _store(builder, weight, at, 4)
                builder.store(builder.fadd(builder.load(kept[1]), weight), kept[1])
            _store(builder, largest, at_maximum, 4)
            _store(builder, builder.load(kept[1]), at_sum, 4)
            with cgutils.for_range(builder, size) as element:
                at = builder.add(builder.add(outputs, offset), builder.mul(element.index, tile_bytes))
                _store(builder, builder.fmul(_load(builder, at, _VECTOR, 4), shrinking), at, 4)

    return types.void(*[_int64] * 8), generate


def _reader(kind: Any, result: Any) -> Any:
    @_intrinsic
    def get(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _load(builder, arguments[0], kind, kind_bytes)

        return result(_int64), generate

    kind_bytes = 4 if kind is _FLOAT else 8
    return get


def _writer(kind: Any, given: Any) -> Any:
    @_intrinsic
    def put(typing: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
            stored = builder.trunc(arguments[1], kind) if kind is _INT32 else arguments[1]
            _store(builder, stored, arguments[0], 8 if kind is _INT64 else 4)

        return types.void(_int64, given), generate

    return put


# Of the number at an address; `_put_integer` stores the lower 32 bits.
_get, _get_integer = _reader(_FLOAT, types.float32), _reader(_INT64, _int64)
_put, _put_integer, _put_address = _writer(_FLOAT, types.float32), _writer(_INT32, _int64), _writer(_INT64, _int64)


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose vectors: the columns of as many rows as a vector has elements."""
    step = 1
    while step < LANES:
        from_first = [j - step + LANES if j & step else j for j in range(LANES)]
        from_second = [j + LANES if j & step else j + step for j in range(LANES)]
        masks = [ir.Constant(ir.VectorType(_INT32, LANES), mask) for mask in (from_first, from_second)]
        for i in range(LANES):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        step *= 2
    return rows


@_intrinsic
def _turn_in(typing: Any, addresses: Any, offset: Any, scale: Any, target: Any) -> Any:
    """Load a vector at `offset` of each row, and store the elements, times a scale, as rows of a tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        addresses, offset, scale, target = arguments
        at = [_load(builder, builder.add(addresses, _INT64(8 * i)), _INT64, 8) for i in range(LANES)]
        rows = [_load(builder, builder.add(row, offset), _VECTOR, 4) for row in at]
        factor = _spread(builder, scale)
        for i, column in enumerate(_turned(builder, rows)):
            _store(builder, builder.fmul(column, factor), builder.add(target, _INT64(4 * TILE_QUERIES * i)), 4)

    return types.void(_int64, _int64, types.float32, _int64), generate


@_intrinsic
def _turn_out(typing: Any, source: Any, factors: Any, addresses: Any, offset: Any) -> Any:
    """Store rows of a tile, times a factor for each column, at `offset` of the rows at the addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        source, factors, addresses, offset = arguments
        factor = _load(builder, factors, _VECTOR, 4)
        at = [builder.add(source, _INT64(4 * TILE_QUERIES * i)) for i in range(LANES)]
        rows = [builder.fmul(_load(builder, row, _VECTOR, 4), factor) for row in at]
        for i, column in enumerate(_turned(builder, rows)):
            row = _load(builder, builder.add(addresses, _INT64(8 * i)), _INT64, 8)
            _store(builder, column, builder.add(row, offset), 4)

    return types.void(*[_int64] * 4), generate


# A score that a query starts with: less than any, and its difference from minus infinity is no NaN.
_LEAST = np.float32(-3e38)


@numba.njit
def _attend_tile(data: Any, scratch: Any, job: Any, head: Any, first_row: Any, rows: Any) -> None:
    """Attention of a tile: rows `first_row` … of a job's (token, query head) pairs of one key head, over its segments.

    Products have keys or elements of a head for rows, and queries for columns, so keys and values are read as they
    are, and a query's maximum is that of a column.
    """
    segments, q, q_row, q_head = data[6], data[7], data[8], data[9]
    out, out_row, out_head = data[10], data[11], data[12]
    lse, lse_row, group, size, window = data[13], data[14], data[16], data[17], data[18]
    scale = _get(data[19])
    token, position = _get_integer(job), _get_integer(job + 16)
    width = 4 * TILE_QUERIES
    queries, outputs = scratch, scratch + size * width
    scores = outputs + size * width
    maximum = scores + BLOCK_KEYS * width
    sums, low, high, addresses = maximum + width, maximum + 2 * width, maximum + 3 * width, maximum + 4 * width
    vectors, turned = (rows + LANES - 1) // LANES, size // LANES * LANES
    # Columns behind the last row repeat it.
    for lane in range(vectors * LANES):
        row = first_row + min(lane, rows - 1)
        source = q + (token + row // group) * q_row + (head * group + row % group) * q_head
        _put_address(addresses + 8 * lane, source)
        for element in range(turned, size):
            _put(queries + element * width + 4 * lane, _get(source + 4 * element) * scale)
        _put(maximum + 4 * lane, _LEAST)
        _put(sums + 4 * lane, np.float32(0.0))
    for vector in range(vectors):
        for element in range(0, turned, LANES):
            target = queries + element * width + 4 * LANES * vector
            _turn_in(addresses + 8 * LANES * vector, 4 * element, scale, target)
    first_position, last_position = position + first_row // group, position + (first_row + rows - 1) // group
    adds = 0  # what the memory holds before the first block is no number
    for number in range(_get_integer(job + 24), _get_integer(job + 32)):
        segment = segments + 64 * number
        keys, values = _get_integer(segment), _get_integer(segment + 8)
        key_row, value_row = _get_integer(segment + 16), _get_integer(segment + 24)
        keys += head * _get_integer(segment + 32)
        values += head * _get_integer(segment + 40)
        length, start = _get_integer(segment + 48), _get_integer(segment + 56)
        for lane in range(vectors * LANES):
            own = position + (first_row + min(lane, rows - 1)) // group - start
            _put_integer(low + 4 * lane, max(0, own + 1 - window) if window else 0)
            _put_integer(high + 4 * lane, min(length, own + 1))
        end = min(length, last_position + 1 - start)
        all_see_to = min(length, first_position + 1 - start)
        all_see_from = max(0, last_position + 1 - start - window) if window else 0
        begin = max(0, first_position + 1 - start - window) if window else 0
        for key in range(begin, end, BLOCK_KEYS):
            count = min(BLOCK_KEYS, end - key)
            at = 0
            while at < count:
                step = _STEP_ROWS if at + _STEP_ROWS <= count else 1
                _step(step, vectors, keys + (key + at) * key_row, key_row, 4, queries, size, scores + at * width, 0)
                at += step
            is_masked = key < all_see_from or key + count > all_see_to
            _softmax(vectors, scores, count, key, low if is_masked else 0, maximum, outputs, size if adds else 0)
            at = 0
            while at < size:
                step = _STEP_ROWS if at + _STEP_ROWS <= size else 1
                _step(step, vectors, values + key * value_row + 4 * at, 4, value_row, scores, count,
                      outputs + at * width, adds)  # fmt: skip
                at += step
            adds = 1
    if not adds:  # no key is seen
        for element in range(size):
            for lane in range(vectors * LANES):
                _put(outputs + element * width + 4 * lane, np.float32(0.0))
    for lane in range(vectors * LANES):
        row = first_row + min(lane, rows - 1)
        own_token, own_head = token + row // group, head * group + row % group
        target, total = out + own_token * out_row + own_head * out_head, _get(sums + 4 * lane)
        factor = np.float32(1.0) / total if total > 0 else np.float32(0.0)
        _put(sums + 4 * lane, factor)
        _put_address(addresses + 8 * lane, target)
        for element in range(turned, size):
            _put(target + 4 * element, _get(outputs + element * width + 4 * lane) * factor)
        weight = np.float32(math.log(total)) + _get(maximum + 4 * lane) if total > 0 else np.float32(-np.inf)
        _put(lse + own_token * lse_row + 4 * own_head, weight)
    for vector in range(vectors):
        for element in range(0, turned, LANES):
            source = outputs + element * width + 4 * LANES * vector
            _turn_out(source, sums + 4 * LANES * vector, addresses + 8 * LANES * vector, 4 * element)


def attend(address: Any) -> None:
    """Attention of tokens to the segments of keys that each sees, up to its own position.

    Arguments: jobs and their number, segments, q, bytes of its rows and heads, out, bytes of its rows and heads, the
    log-sum-exps, bytes of their rows, key heads, query heads of each, elements of a head, window (0: none), address of
    the scale, scratch memory, its bytes for a thread.
    A job has 5 integers: first token, tokens, position of the first, its first segment, and the one behind its last.
    A segment has 8: addresses of keys and values, bytes of their rows, bytes of their heads, length, first position.
    """
    data = numba.carray(address, 22, np.int64)
    jobs, count, heads, group = data[4], data[5], data[15], data[16]
    part, parts = _part(data)
    scratch = data[20] + part * data[21]
    number = 0
    for index in range(count):
        job = jobs + 40 * index
        rows = _get_integer(job + 8) * group
        for head in range(heads):
            for first in range(0, rows, TILE_QUERIES):
                if number % parts == part:
                    _attend_tile(data, scratch, job, head, first, min(TILE_QUERIES, rows - first))
                number += 1


@cache
def address_of(function: Any) -> int:
    """Compile a function for this processor, or take what an earlier process compiled; return its address."""
    signature = types.void(types.CPointer(_int64))
    try:
        compiled: Any = numba.cfunc(signature, cache=True)(function)
    except RuntimeError:  # numba may write nowhere
        compiled = numba.cfunc(signature)(function)
    return int(compiled.address)
