"""Products in float32 by a processor's matrix unit (AMX), which multiplies bfloat16 numbers, compiled.

The first 8 bits of a float32 number, the next 8 and the last 8 are bfloat16 numbers, and their sum is the number:

    x = x1 + x2 + x3        y = x1 w + x2 w + x3 w        w in bfloat16

A weight in float16 has 11 bits and is the sum of two such numbers, one in float32 of three. Of their products those
below 2^-24 of the first are left out: x3 w2, x2 w3, x3 w3. Products are exact and sums are in float32, so y is as exact
as a product in float32.

A tile register has 16 rows of 64 bytes. The unit adds to y^T [16 outputs, 16 rows] the product of w [16 outputs, 32]
and x^T [32, 16 rows], in which numbers of a row lie in pairs. bfloat16 weights are read as they rest, and pairs
are neighbours. Others are divided, a panel ahead of the unit; their pairs are numbers i and i + 16, in x too.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    INT16,
    INT32,
    INT64,
    VECTOR,
    done,
    emitted,
    get_integer,
    int64,
    load,
    njit,
    part_of_thread,
    prefetch,
    put_integer,
    store,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32

# Rows of a tile; columns that one instruction multiplies; bytes of a tile's row, and of a tile.
SIDE, DEPTH = 16, 32
ROW_BYTES, TILE_BYTES = 64, 1024
# Outputs of a panel: two tiles beside two tiles of rows are four sums, each operand of which is used twice.
PANEL = 2 * SIDE
# Parts of a number of x; and with how many of them each part of a weight is multiplied: bfloat16, float16, float32.
PARTS = 3
WEIGHT_PARTS = ((3,), (3, 2), (3, 2, 1))
# Steps whose products are one chain of float32 sums. Longer ones lose digits where all terms have one sign.
CHAIN_STEPS = 16
# Panels whose sums wait together for the next block of columns.
GROUP = 8
# Bytes of weights that are asked for ahead of the division.
_AHEAD = 2048
_SUMS, _WEIGHTS, _ROWS = (0, 1, 2, 3), (4, 5), (6, 7)
_BYTE = ir.IntType(8)
_POINTER = _BYTE.as_pointer()
_INTEGERS = ir.VectorType(INT32, SIDE)


def _call(builder: Any, name: str, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    name = f"llvm.x86.{name}"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name=name)
    builder.call(function, arguments)


def _load_tile(builder: Any, tile: int, address: Any, row_bytes: Any) -> None:
    _call(builder, "tileloadd64", [_BYTE(tile), builder.inttoptr(address, _POINTER), row_bytes])


def _multiply_tiles(builder: Any, row_tiles: int) -> None:
    """Add the products of both weight tiles with the tiles of rows to the sums."""
    for i in range(2):
        for j in range(row_tiles):
            _call(builder, "tdpbf16ps", [_BYTE(_SUMS[2 * i + j]), _BYTE(_WEIGHTS[i]), _BYTE(_ROWS[j])])


def _panel(builder: Any, row_tiles: int, kind: int, arguments: Any) -> None:
    """Emit the product of a panel of weights with one or two tiles of rows, over all steps of a block of columns.

    Every `CHAIN_STEPS` the tiles are added to the sums in memory, and begin with zeros again.
    While the unit multiplies, the processor takes lines of the panel that is next (`_take_lines`).
    """
    weights, weight_row, rows, row_tile, steps, sums, is_first, lines, *following_panel = arguments
    places = [builder.add(sums, INT64(TILE_BYTES * place)) for place in range(2 * row_tiles)]
    used = [_SUMS[2 * i + j] for i in range(2) for j in range(row_tiles)]
    # Weights of several parts were divided before: two tiles of each part follow each other.
    is_divided = kind != BFLOAT16
    step_bytes = _step_bytes(kind) if is_divided else 2 * DEPTH
    chain_sums = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(VECTOR, SIDE)), INT64)
    with cgutils.for_range_slice(builder, INT64(0), steps, INT64(CHAIN_STEPS)) as (start, _):
        for tile in used:
            _call(builder, "tilezero", [_BYTE(tile)])
        end = builder.add(start, INT64(CHAIN_STEPS))
        end = builder.select(builder.icmp_signed("<", end, steps), end, steps)
        with cgutils.for_range_slice(builder, start, end, INT64(1)) as (step, _):
            weights_at = builder.add(weights, builder.mul(step, INT64(step_bytes)))
            rows_at = builder.add(rows, builder.mul(step, INT64(PARTS * TILE_BYTES)))
            # Some lines behind each product of tiles: the processor looks ahead no further than some of these.
            products, all_products = 0, INT64(sum(WEIGHT_PARTS[kind]))
            first_line = last_line = builder.mul(step, lines)
            for weight_part, parts in enumerate(WEIGHT_PARTS[kind]):
                for i, tile in enumerate(_WEIGHTS):
                    if is_divided:
                        place = builder.add(weights_at, INT64(TILE_BYTES * (2 * weight_part + i)))
                        _load_tile(builder, tile, place, INT64(ROW_BYTES))
                    else:
                        place = builder.add(weights_at, builder.mul(weight_row, INT64(SIDE * i)))
                        _load_tile(builder, tile, place, weight_row)
                for part in range(parts):
                    for j in range(row_tiles):
                        own = builder.add(rows_at, builder.mul(row_tile, INT64(j)))
                        _load_tile(builder, _ROWS[j], builder.add(own, INT64(TILE_BYTES * part)), INT64(ROW_BYTES))
                    _multiply_tiles(builder, row_tiles)
                    products += 1
                    taken = builder.udiv(builder.mul(lines, INT64(products)), all_products)
                    line, last_line = last_line, builder.add(first_line, taken)
                    _take_lines(builder, kind, line, last_line, *following_panel)
        has_sums = builder.or_(
            builder.icmp_signed("==", is_first, INT64(0)), builder.icmp_signed("!=", start, INT64(0))
        )
        for tile, place in zip(used, places):
            _call(builder, "tilestored64", [_BYTE(tile), builder.inttoptr(chain_sums, _POINTER), INT64(ROW_BYTES)])
            _add_tile(builder, chain_sums, place, has_sums)


def _add_tile(builder: Any, tile: Any, sums: Any, has_sums: Any) -> None:
    """Add a tile in memory to the sums, or write it there if there are none."""
    for row in range(0, TILE_BYTES, ROW_BYTES):
        new, place = load(builder, builder.add(tile, INT64(row)), VECTOR, 4), builder.add(sums, INT64(row))
        total = builder.fadd(load(builder, place, VECTOR, 4), new)
        store(builder, builder.select(has_sums, total, new), place, 4)


def _step_bytes(kind: int) -> int:
    """Bytes of a panel's parts in one step. One line more: so all steps of a row are not in one set of the cache."""
    return 2 * len(WEIGHT_PARTS[kind]) * TILE_BYTES + ROW_BYTES


@emitted
def _multiply_panel(
    typing: Any, tiles: Any, kind: Any, weights: Any, row: Any, rows: Any, tile: Any, steps: Any, sums: Any, first: Any,
    lines: Any, next_weights: Any, next_row: Any, next_steps: Any, next_first: Any, to: Any,
) -> Any:  # fmt: skip
    """Sums of a panel with one or two tiles of rows; and some lines of the next panel in each step (`_take_lines`)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        for case in product((1, 2), range(len(WEIGHT_PARTS))):
            equal = [builder.icmp_signed("==", own, INT64(number)) for own, number in zip(arguments, case)]
            with builder.if_then(builder.and_(*equal)):
                _panel(builder, *case, arguments[2:])

    return types.void(*[int64] * 15), generate


@emitted
def _configure(typing: Any, address: Any) -> Any:
    """Give all tile registers of this thread the shape that 64 bytes at an address say."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        _call(builder, "ldtilecfg", [builder.inttoptr(arguments[0], _POINTER)])

    return types.void(int64), generate


@emitted
def _release(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        _call(builder, "tilerelease", [])

    return types.void(), generate


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 16 vectors of 16 elements: each of four steps exchanges halves of groups between two vectors."""
    size = 1
    while size < SIDE:
        # Groups of `size` elements change places between vectors that are `size` apart.
        low = [lane if lane & size == 0 else lane - size + SIDE for lane in range(SIDE)]
        high = [lane + size if lane & size == 0 else lane + SIDE for lane in range(SIDE)]
        masks = [ir.Constant(_INTEGERS, places) for places in (low, high)]
        result = list(rows)
        for first in (row for row in range(SIDE) if row & size == 0):
            pair = rows[first], rows[first + size]
            result[first], result[first + size] = (builder.shuffle_vector(*pair, mask) for mask in masks)
        rows, size = result, 2 * size
    return rows


@emitted
def _store_sums(typing: Any, tile: Any, y: Any, y_row: Any, count: Any) -> Any:
    """Store the first `count` columns of a tile [16 outputs, 16 rows] as rows of y."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        tile, y, y_row, count = arguments
        own = [load(builder, builder.add(tile, INT64(ROW_BYTES * row)), VECTOR, 4) for row in range(SIDE)]
        for row, vector in enumerate(_transposed(builder, own)):
            with builder.if_then(builder.icmp_signed("<", INT64(row), count)):
                store(builder, vector, builder.add(y, builder.mul(y_row, INT64(row))), 4)

    return types.void(*[int64] * 4), generate


def _parts_of(builder: Any, halves: list[Any], count: int, in_order: bool = False) -> list[Any]:
    """The bfloat16 numbers that add up to those of two vectors, in pairs of 32 bits: a vector for each part.

    A number's upper 16 bits are one of bfloat16. What they leave is exact, too.

    in_order: pairs are neighbours; else of a number of each vector, which takes fewer instructions.
    """
    words, shift = ir.VectorType(INT16, 2 * SIDE), ir.Constant(_INTEGERS, [16] * SIDE)
    mask = ir.Constant(_INTEGERS, [0xFFFF0000] * SIDE)
    odd = ir.Constant(ir.VectorType(INT32, 2 * SIDE), [2 * lane + 1 for lane in range(2 * SIDE)])
    parts = []
    for _ in range(count):
        first, second = (builder.bitcast(half, _INTEGERS) for half in halves)
        upper = [builder.and_(bits, mask) for bits in (first, second)]
        if in_order:
            joined = builder.shuffle_vector(*(builder.bitcast(bits, words) for bits in upper), odd)
            parts.append(builder.bitcast(joined, _INTEGERS))
        else:
            parts.append(builder.or_(builder.lshr(first, shift), upper[1]))
        halves = [builder.fsub(half, builder.bitcast(bits, VECTOR)) for half, bits in zip(halves, upper)]
    return parts


@emitted
def _divide_rows(typing: Any, in_order: Any, x: Any, x_row: Any, last: Any, to: Any) -> Any:
    """Write a tile of each part of x [16 rows, 32 columns]; rows behind the last one repeat it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        in_order, *operands = arguments
        with builder.if_else(builder.icmp_signed("!=", in_order, INT64(0))) as (neighbours, others):
            with neighbours:
                _divide_tile(builder, True, *operands)
            with others:
                _divide_tile(builder, False, *operands)

    return types.void(*[int64] * 5), generate


def _divide_tile(builder: Any, in_order: bool, x: Any, x_row: Any, last: Any, to: Any) -> None:
    pairs: list[list[Any]] = [[] for _ in range(PARTS)]
    for row in range(SIDE):
        inside = builder.icmp_signed("<", INT64(row), last)
        own = builder.add(x, builder.mul(x_row, builder.select(inside, INT64(row), last)))
        halves = [load(builder, builder.add(own, INT64(ROW_BYTES * half)), VECTOR, 4) for half in range(2)]
        for part, joined in enumerate(_parts_of(builder, halves, PARTS, in_order)):
            pairs[part].append(joined)
    for part, own_pairs in enumerate(pairs):
        for row, vector in enumerate(_transposed(builder, own_pairs)):
            store(builder, vector, builder.add(to, INT64(TILE_BYTES * part + ROW_BYTES * row)), 4)


@emitted
def _divide_panel(typing: Any, kind: Any, weights: Any, weight_row: Any, steps: Any, to: Any) -> Any:
    """Divide a panel at once, where none is multiplied meanwhile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        kind, weights, weight_row, steps, to = arguments
        for case in (FLOAT16, FLOAT32):
            with builder.if_then(builder.icmp_signed("==", kind, INT64(case))):
                lines = builder.mul(steps, INT64(PANEL))
                _take_lines(builder, case, INT64(0), lines, weights, weight_row, steps, INT64(0), to)

    return types.void(*[int64] * 5), generate


def _take_lines(
    builder: Any, kind: int, first: Any, last: Any, weights: Any, weight_row: Any, steps: Any, start: Any, to: Any
) -> None:
    """Emit a loop over lines of a panel, 32 columns each, in the order in which they lie in memory.

    Lines in bfloat16 are only asked for. Others are divided: two tiles of each part, step by step.

    first, last: lines, counted from `start`; those behind the panel's end are none.
    """
    element, vector = (4, VECTOR) if kind == FLOAT32 else (2, ir.VectorType(ir.HalfType(), SIDE))
    first, last = builder.add(first, start), builder.add(last, start)
    end = builder.mul(steps, INT64(PANEL))
    last = builder.select(builder.icmp_signed("<", last, end), last, end)
    head, loop, behind = (builder.append_basic_block() for _ in range(3))
    builder.cbranch(builder.icmp_signed("<", first, last), head, behind)
    builder.position_at_end(head)
    first_row = builder.udiv(first, steps)
    first_step = builder.sub(first, builder.mul(first_row, steps))
    builder.branch(loop)
    builder.position_at_end(loop)
    number, row, step = (builder.phi(INT64) for _ in range(3))
    for own, value in zip((number, row, step), (first, first_row, first_step)):
        own.add_incoming(value, head)
    own = builder.add(builder.add(weights, builder.mul(weight_row, row)), builder.mul(step, INT64(element * DEPTH)))
    if kind == BFLOAT16:
        prefetch(builder, own, 2)
    else:
        # Rows of the second tile follow the 16 of the first one.
        in_tiles = builder.add(builder.mul(row, INT64(ROW_BYTES)), builder.mul(step, INT64(_step_bytes(kind))))
        target = builder.add(to, in_tiles)
        places = [builder.add(own, INT64(element * SIDE * half)) for half in range(2)]
        for line in range(element * DEPTH // ROW_BYTES):
            prefetch(builder, builder.add(own, INT64(_AHEAD + ROW_BYTES * line)))
        halves = [load(builder, place, vector, element) for place in places]
        halves = [builder.fpext(half, VECTOR) for half in halves] if kind == FLOAT16 else halves
        for part, joined in enumerate(_parts_of(builder, halves, len(WEIGHT_PARTS[kind]))):
            store(builder, joined, builder.add(target, INT64(2 * TILE_BYTES * part)), ROW_BYTES)
    following, next_step = builder.add(number, INT64(1)), builder.add(step, INT64(1))
    is_end = builder.icmp_signed("==", next_step, steps)
    number.add_incoming(following, loop)
    row.add_incoming(builder.select(is_end, builder.add(row, INT64(1)), row), loop)
    step.add_incoming(builder.select(is_end, INT64(0), next_step), loop)
    builder.cbranch(builder.icmp_signed("<", following, last), loop, behind)
    builder.position_at_end(behind)


@njit
def _prepare(memory: Any) -> None:
    """Give all tile registers of this thread 16 rows of 64 bytes."""
    for place in range(0, 64, 4):
        put_integer(memory + place, 0)
    put_integer(memory, 1)  # the palette; then the bytes of a row and the rows of each register
    for place in range(16, 32, 4):
        put_integer(memory + place, ROW_BYTES << 16 | ROW_BYTES)
    for place in range(48, 56, 4):
        put_integer(memory + place, SIDE << 24 | SIDE << 16 | SIDE << 8 | SIDE)
    _configure(memory)


@njit
def _divide_block(in_order: Any, x: Any, x_row: Any, count: Any, steps: Any, tiles: Any) -> None:
    """Divide rows of x [count, 32 steps] into their parts: tiles [count / 16, step, part]."""
    for row in range(0, count, SIDE):
        last = min(SIDE, count - row) - 1
        for step in range(steps):
            source, target = x + row * x_row + step * 4 * DEPTH, (row // SIDE * steps + step) * PARTS * TILE_BYTES
            _divide_rows(in_order, source, x_row, last, tiles + target)


@njit
def _store_panel(sums: Any, tiles: Any, y: Any, y_row: Any, count: Any) -> None:
    """Store the sums of a panel with one or two tiles of rows, of which `count` rows count."""
    for i in range(2):
        for j in range(tiles):
            target = y + j * SIDE * y_row + i * SIDE * 4
            _store_sums(sums + (i * tiles + j) * TILE_BYTES, target, y_row, min(SIDE, count - j * SIDE))


_MOST_STEP_BYTES = _step_bytes(FLOAT32)
# Of a column of two panels in float16 that are divided.
PANEL_BYTES = 2 * _step_bytes(FLOAT16) // DEPTH


@njit
def _matrix(table: Any, number: Any) -> Any:
    """Find which matrix of a table the panel with this number is of, and its number there."""
    while number >= get_integer(table + 40):
        number -= get_integer(table + 40)
        table += 48
    # The last panel of a matrix is whole: it computes some outputs of the one before it again.
    return table, min(number * PANEL, get_integer(table + 32) - PANEL)


@njit
def _following(group: Any, column: Any, panel: Any, group_panels: Any, last_panel: Any, block: Any, width: Any) -> Any:
    """Name the panel behind this one: of its group, else the group's first in the next columns, else the next group's.

    It is none if it is not before `last_panel`.
    """
    if panel + 1 < min(group + group_panels, last_panel):
        return group, column, panel + 1
    if column + block < width:
        return group, column + block, group
    return group + group_panels, np.int64(0), group + group_panels


def multiply(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and some matrices w [outputs, width].

    Threads divide rows among them, and outputs where rows are few: none waits for another. A thread takes its rows in
    blocks whose parts stay in its core's cache while panels of weights pass by, and wide ones in blocks of columns too.
    The order of a sum depends on the width alone.

    Arguments: kind of the weights, x, bytes of its rows, T, width and columns of a block (multiples of 32), rows of a
    block (a multiple of 16), groups of threads with different rows, memory, bytes of a thread's share of it
    (`scratch_bytes`), panels of all matrices, a table with six numbers for each: w, bytes of its rows, y, bytes of its
    rows, outputs (at least 32), panels.
    """
    data = numba.carray(address, 16, np.int64)
    kind, x, x_row, all_rows, width, block, block_rows = data[4], data[5], data[6], data[7], data[8], data[9], data[10]
    panels, table = data[14], data[15]
    part, parts = part_of_thread(address)
    row_groups = min(data[11], parts)
    output_groups = parts // row_groups
    if part >= row_groups * output_groups:
        done(address, part)
        return
    memory = data[12] + part * data[13]
    _prepare(memory)
    steps, all_tiles = width // DEPTH, (all_rows + SIDE - 1) // SIDE
    row_group, output_group = part // output_groups, part % output_groups
    last_row = min(all_tiles * (row_group + 1) // row_groups * SIDE, all_rows)
    first_panel, last_panel = panels * output_group // output_groups, panels * (output_group + 1) // output_groups
    element = 4 if kind == FLOAT32 else 2
    tiles = memory + 64
    divided = tiles + block_rows * steps * 2 * DEPTH * PARTS
    divided_bytes = block // DEPTH * _MOST_STEP_BYTES
    waiting = divided + 2 * divided_bytes
    group_panels = GROUP if block < width else max(1, panels)
    for first in range(all_tiles * row_group // row_groups * SIDE, last_row, block_rows):
        count = min(block_rows, last_row - first)
        row_tiles = (count + SIDE - 1) // SIDE
        pairs = (row_tiles + 1) // 2
        _divide_block(np.int64(kind == BFLOAT16), x + first * x_row, x_row, count, steps, tiles)
        turn, group, column, panel = np.int64(0), first_panel, np.int64(0), first_panel
        own, output = _matrix(table, panel)
        if kind != BFLOAT16 and panel < last_panel:
            weights = get_integer(own) + output * get_integer(own + 8)
            _divide_panel(kind, weights, get_integer(own + 8), min(block, width) // DEPTH, divided)
        while panel < last_panel:
            next_group, next_column, next_panel = _following(
                group, column, panel, group_panels, last_panel, block, width
            )
            has_next = next_panel < last_panel
            next_own, next_output = _matrix(table, next_panel if has_next else panel)
            row_bytes, next_row_bytes = get_integer(own + 8), get_integer(next_own + 8)
            weights = get_integer(own) + output * row_bytes + column * element
            next_weights = get_integer(next_own) + next_output * next_row_bytes + next_column * element
            own_steps = min(block, width - column) // DEPTH
            next_steps = min(block, width - next_column) // DEPTH if has_next else np.int64(0)
            if kind != BFLOAT16:
                weights = divided + turn * divided_bytes
            target = divided + (1 - turn) * divided_bytes
            lines = (PANEL * next_steps + pairs * own_steps - 1) // (pairs * own_steps)
            y, y_row = get_integer(own + 16), get_integer(own + 24)
            for tile in range(0, row_tiles, 2):
                own_tiles = min(2, row_tiles - tile)
                sums = waiting
                if block < width:
                    sums += ((panel - group) * (row_tiles + 1) + tile) * 2 * TILE_BYTES
                rows = tiles + (tile * steps + column // DEPTH) * PARTS * TILE_BYTES
                _multiply_panel(own_tiles, kind, weights, row_bytes, rows, steps * PARTS * TILE_BYTES, own_steps, sums,
                                np.int64(column == 0), lines, next_weights, next_row_bytes, next_steps,
                                tile // 2 * own_steps * lines, target)  # fmt: skip
                if column + block >= width:
                    row = first + tile * SIDE
                    _store_panel(sums, own_tiles, y + row * y_row + output * 4, y_row, last_row - row)
            group, column, panel = next_group, next_column, next_panel
            turn, own, output = 1 - turn, next_own, next_output
    _release()
    done(address, part)


def scratch_bytes(rows: int, width: int, block: int) -> int:
    """Return the bytes of a thread's memory in `multiply`, whole lines of the cache; rows: of a block."""
    divided = 2 * (block // DEPTH) * _MOST_STEP_BYTES
    waiting = GROUP * (rows // SIDE + 1) if block < width else 2
    return 64 + rows * width * 2 * PARTS + divided + 2 * waiting * TILE_BYTES
