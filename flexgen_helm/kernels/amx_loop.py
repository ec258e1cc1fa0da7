"""Products in float32 by a processor's matrix unit (AMX), which multiplies bfloat16 numbers,
compiled.

The first 8 bits of a float32 number, the next 8 and the last 8 are bfloat16 numbers, and their sum
is the number:

    x = x1 + x2 + x3        y = x1 w + x2 w + x3 w        w in bfloat16

A weight in float16 has 11 bits and is the sum of two such numbers, one in float32 of three. Of
their products those below 2^-24 of the first are left out: x3 w2, x2 w3, x3 w3. Products are exact
and sums are in float32, so y is as exact as a product in float32.

A tile register has 16 rows of 64 bytes. The unit adds to y^T [16 outputs, 16 rows] the product of w
[16 outputs, 32] and x^T [32, 16 rows], in which numbers of a row lie in pairs. bfloat16 weights are
read as they rest, and pairs are neighbours. Others are divided, a panel ahead of the unit; their
pairs are numbers i and i + 16, in x too.
"""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.amx import MATRIX, Products
from flexgen_helm.kernels.emit import (
    INT16,
    INT32,
    INT64,
    VECTOR,
    Loop,
    call_llvm,
    integers,
    ir_statement,
    load,
    njit,
    prefetch,
    records,
    store,
    transposed,
)
from flexgen_helm.kernels.team import BFLOAT16, FLOAT16, FLOAT32

# Rows of a tile; columns that one instruction multiplies; bytes of a tile's row, and of a tile.
SIDE, DEPTH = 16, 32
ROW_BYTES, TILE_BYTES = 64, 1024
# Outputs of a panel: two tiles beside two tiles of rows are four sums, each operand of which is
# used twice.
PANEL = 2 * SIDE
# Parts of a number of x; and with how many of them each part of a weight is multiplied: bfloat16,
# float16, float32.
PARTS = 3
WEIGHT_PARTS = ((3,), (3, 2), (3, 2, 1))
# Steps whose products are one chain of float32 sums. Longer ones lose digits where all terms have
# one sign.
CHAIN_STEPS = 16
# Panels whose sums wait together for the next block of columns.
GROUP = 8
# Bytes of weights that are asked for ahead of the division.
_AHEAD = 2048
_SUMS, _WEIGHTS, _ROWS = (0, 1, 2, 3), (4, 5), (6, 7)
_BYTE = ir.IntType(8)
_POINTER = _BYTE.as_pointer()
_INTEGERS = ir.VectorType(INT32, SIDE)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _load_tile(builder: Any, tile: int, address: Any, row_bytes: Any) -> None:
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(address, _POINTER), row_bytes)


# Lines of a panel of weights, of 32 columns, that are divided. start: the first line, counted from
# the panel's first; to: where parts go.
_Lines = namedtuple("_Lines", "kind weights weight_row steps start to")
# A panel of weights times one or two tiles of rows, over all steps of a block of columns, and how
# many lines of the next panel are taken in a step.
_Panel = namedtuple(
    "_Panel",
    "row_tiles kind weights weight_row rows row_tile steps sums is_first lines next_weights "
    "next_weight_row next_steps next_start next_to",
)


@ir_statement((1, 2), (BFLOAT16, FLOAT16, FLOAT32))
def _multiply_panel(builder: Any, given: Any) -> None:
    """Every `CHAIN_STEPS` the tiles are added to the sums in memory, and begin with zeros again.
    While the unit multiplies, the processor takes lines of the panel that is next (`_take_lines`).
    """
    used = [_SUMS[2 * i + j] for i in range(2) for j in range(given.row_tiles)]
    chain_sums = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(VECTOR, SIDE)), INT64)
    with cgutils.for_range_slice(builder, INT64(0), given.steps, INT64(CHAIN_STEPS)) as (start, _):
        for tile in used:
            _call(builder, "tilezero", _BYTE(tile))
        end = builder.add(start, INT64(CHAIN_STEPS))
        end = builder.select(builder.icmp_signed("<", end, given.steps), end, given.steps)
        with cgutils.for_range_slice(builder, start, end, INT64(1)) as (step, _):
            _multiply_step(builder, given, step)
        has_sums = builder.or_(
            builder.icmp_signed("==", given.is_first, INT64(0)),
            builder.icmp_signed("!=", start, INT64(0)),
        )
        for number, tile in enumerate(used):
            at = builder.inttoptr(chain_sums, _POINTER)
            _call(builder, "tilestored64", _BYTE(tile), at, INT64(ROW_BYTES))
            sums = builder.add(given.sums, INT64(TILE_BYTES * number))
            _add_tile(builder, chain_sums, sums, has_sums)


def _multiply_step(builder: Any, given: Any, step: Any) -> None:
    """Multiply 32 columns."""
    kind, pairs = given.kind, [(i, j) for i in range(2) for j in range(given.row_tiles)]
    # Weights of several parts were divided before: two tiles of each part follow each other.
    is_divided = kind != BFLOAT16
    step_bytes = _step_bytes(kind) if is_divided else 2 * DEPTH
    tile_bytes = INT64(TILE_BYTES) if is_divided else builder.mul(given.weight_row, INT64(SIDE))
    weight_row = INT64(ROW_BYTES) if is_divided else given.weight_row
    weights_at = builder.add(given.weights, builder.mul(step, INT64(step_bytes)))
    rows_at = builder.add(given.rows, builder.mul(step, INT64(PARTS * TILE_BYTES)))
    following = _Lines(
        kind,
        given.next_weights,
        given.next_weight_row,
        given.next_steps,
        given.next_start,
        given.next_to,
    )
    # Some lines behind each product of tiles: the processor looks ahead no further than some of
    # these.
    products, all_products = 0, INT64(sum(WEIGHT_PARTS[kind]))
    first_line = last_line = builder.mul(step, given.lines)
    for parts in WEIGHT_PARTS[kind]:
        for tile in _WEIGHTS:
            _load_tile(builder, tile, weights_at, weight_row)
            weights_at = builder.add(weights_at, tile_bytes)
        for part in range(parts):
            for j in range(given.row_tiles):
                at = builder.add(rows_at, builder.mul(given.row_tile, INT64(j)))
                at = builder.add(at, INT64(TILE_BYTES * part))
                _load_tile(builder, _ROWS[j], at, INT64(ROW_BYTES))
            for i, j in pairs:
                tiles = _SUMS[2 * i + j], _WEIGHTS[i], _ROWS[j]
                _call(builder, "tdpbf16ps", *map(_BYTE, tiles))
            products += 1
            taken = builder.udiv(builder.mul(given.lines, INT64(products)), all_products)
            line, last_line = last_line, builder.add(first_line, taken)
            _take_lines(builder, following, line, last_line)


def _add_tile(builder: Any, tile: Any, sums: Any, has_sums: Any) -> None:
    """Add a tile in memory to the sums, or write it there if there are none."""
    for row in range(0, TILE_BYTES, ROW_BYTES):
        new = load(builder, builder.add(tile, INT64(row)), VECTOR, 4)
        target = builder.add(sums, INT64(row))
        total = builder.fadd(load(builder, target, VECTOR, 4), new)
        store(builder, builder.select(has_sums, total, new), target, 4)


def _step_bytes(kind: int) -> int:
    """Bytes of a panel's parts in one step. One line more: so all steps of a row are not in one set
    of the cache.
    """
    return 2 * len(WEIGHT_PARTS[kind]) * TILE_BYTES + ROW_BYTES


@ir_statement()
def _configure(builder: Any, address: Any) -> None:
    """Give all tile registers of this thread the shape that 64 bytes at an address say."""
    _call(builder, "ldtilecfg", builder.inttoptr(address, _POINTER))


@ir_statement()
def _release(builder: Any) -> None:
    _call(builder, "tilerelease")


@ir_statement()
def _store_sums(builder: Any, tile: Any, y: Any, y_row: Any, count: Any) -> None:
    """Store the first `count` columns of a tile [16 outputs, 16 rows] as rows of y."""
    outputs = [
        load(builder, builder.add(tile, INT64(ROW_BYTES * row)), VECTOR, 4) for row in range(SIDE)
    ]
    for row, vector in enumerate(transposed(builder, outputs)):
        with builder.if_then(builder.icmp_signed("<", INT64(row), count)):
            store(builder, vector, builder.add(y, builder.mul(y_row, INT64(row))), 4)


def _parts_of(builder: Any, halves: list[Any], count: int, in_order: int = 0) -> list[Any]:
    """The bfloat16 numbers that add up to those of two vectors, in pairs of 32 bits: a vector for
    each part.

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
        halves = [
            builder.fsub(half, builder.bitcast(bits, VECTOR)) for half, bits in zip(halves, upper)
        ]
    return parts


# Rows of x from an address on, the last of which is `last`.
_RowTile = namedtuple("_RowTile", "in_order x x_row last to")


@ir_statement((0, 1))
def _divide_tile(builder: Any, given: Any) -> None:
    """Write a tile of each part of x [16 rows, 32 columns]; rows behind the last one repeat it."""
    pairs: list[list[Any]] = [[] for _ in range(PARTS)]
    for row in range(SIDE):
        inside = builder.icmp_signed("<", INT64(row), given.last)
        number = builder.select(inside, INT64(row), given.last)
        at = builder.add(given.x, builder.mul(given.x_row, number))
        halves = [
            load(builder, builder.add(at, INT64(ROW_BYTES * half)), VECTOR, 4) for half in range(2)
        ]
        for part, joined in enumerate(_parts_of(builder, halves, PARTS, given.in_order)):
            pairs[part].append(joined)
    for part, rows in enumerate(pairs):
        for row, vector in enumerate(transposed(builder, rows)):
            at = builder.add(given.to, INT64(TILE_BYTES * part + ROW_BYTES * row))
            store(builder, vector, at, 4)


@ir_statement((FLOAT16, FLOAT32))
def _divide_panel(builder: Any, panel: Any) -> None:
    """Divide a panel at once, where none is multiplied meanwhile."""
    _take_lines(builder, panel, INT64(0), builder.mul(panel.steps, INT64(PANEL)))


def _take_lines(builder: Any, panel: Any, first: Any, last: Any) -> None:
    """Emit a loop over lines of a panel, in the order in which they lie in memory.

    Lines in bfloat16 are only asked for. Others are divided: two tiles of each part, step by step.

    first, last: lines, counted from the start; those behind the panel's end are none.
    """
    steps, element = panel.steps, 4 if panel.kind == FLOAT32 else 2
    first, last = builder.add(first, panel.start), builder.add(last, panel.start)
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
    for phi, value in zip((number, row, step), (first, first_row, first_step)):
        phi.add_incoming(value, head)
    line = builder.add(
        builder.add(panel.weights, builder.mul(panel.weight_row, row)),
        builder.mul(step, INT64(element * DEPTH)),
    )
    if panel.kind == BFLOAT16:
        prefetch(builder, line, 2)
    else:
        # Rows of the second tile follow the 16 of the first one.
        in_tiles = builder.add(
            builder.mul(row, INT64(ROW_BYTES)), builder.mul(step, INT64(_step_bytes(panel.kind)))
        )
        _divide_line(builder, panel.kind, line, builder.add(panel.to, in_tiles))
    following, next_step = builder.add(number, INT64(1)), builder.add(step, INT64(1))
    is_end = builder.icmp_signed("==", next_step, steps)
    number.add_incoming(following, loop)
    row.add_incoming(builder.select(is_end, builder.add(row, INT64(1)), row), loop)
    step.add_incoming(builder.select(is_end, INT64(0), next_step), loop)
    builder.cbranch(builder.icmp_signed("<", following, last), loop, behind)
    builder.position_at_end(behind)


def _divide_line(builder: Any, kind: int, line: Any, target: Any) -> None:
    """Write the parts of 32 neighbouring weights."""
    element, vector = (4, VECTOR) if kind == FLOAT32 else (2, ir.VectorType(ir.HalfType(), SIDE))
    for ahead in range(0, element * DEPTH, ROW_BYTES):
        prefetch(builder, builder.add(line, INT64(_AHEAD + ahead)))
    halves = [
        load(builder, builder.add(line, INT64(element * SIDE * half)), vector, element)
        for half in range(2)
    ]
    halves = [builder.fpext(half, VECTOR) for half in halves] if kind == FLOAT16 else halves
    for part, joined in enumerate(_parts_of(builder, halves, len(WEIGHT_PARTS[kind]))):
        store(builder, joined, builder.add(target, INT64(2 * TILE_BYTES * part)), ROW_BYTES)


@njit
def _prepare(memory: Any) -> None:
    """Give all tile registers of this thread 16 rows of 64 bytes."""
    shape = integers(memory, 8)
    shape[:] = 0
    shape[0] = 1  # the palette; then the bytes of a row and the rows of each register
    shape[2:4] = ROW_BYTES << 48 | ROW_BYTES << 32 | ROW_BYTES << 16 | ROW_BYTES
    shape[6] = 0x1010101010101010
    _configure((memory,))


_MOST_STEP_BYTES = _step_bytes(FLOAT32)
# Of a column of two panels in float16 that are divided.
PANEL_BYTES = 2 * _step_bytes(FLOAT16) // DEPTH


# A thread's panels of weights and its memory: parts of x, of two panels in turn, and sums that wait
# for the next block of columns.
_Share = namedtuple("_Share", "first_panel last_panel tiles divided divided_bytes waiting")
# A panel's weights in a block of columns, and its first output in y. Panels of a group are
# multiplied before the next block of columns.
_Turn = namedtuple("_Turn", "group column panel weights w_row steps y y_row")


@njit
def _turn(given: Any, share: Any, group: Any, column: Any, panel: Any) -> Any:
    """Return what is multiplied in a turn; no steps behind the last panel."""
    matrices = records(given.matrices, given.num_matrices, MATRIX)
    matrix, number = 0, min(panel, share.last_panel - 1)
    while number >= matrices[matrix].panels:
        number -= matrices[matrix].panels
        matrix += 1
    at, element = matrices[matrix], 4 if given.kind == FLOAT32 else 2
    # The last panel of a matrix is whole: it computes some outputs of the one before it again.
    output = min(number * PANEL, at.outputs - PANEL)
    steps = min(given.block, given.width - column) // DEPTH
    return _Turn(
        group=group,
        column=column,
        panel=panel,
        weights=at.w + output * at.w_row + column * element,
        w_row=at.w_row,
        steps=steps if panel < share.last_panel else 0,
        y=at.y + output * 4,
        y_row=at.outputs * 4,
    )


@njit
def _following(given: Any, share: Any, turn: Any) -> Any:
    """Return what is next: a panel of the group, else its first in the next columns, else the next
    group's.
    """
    group, column, panel = turn.group, turn.column, turn.panel + 1
    group_panels = GROUP if given.block < given.width else max(1, given.panels)
    if panel >= min(group + group_panels, share.last_panel):
        column += given.block
        if column >= given.width:
            group, column = group + group_panels, 0
        panel = group
    return _turn(given, share, group, column, panel)


@njit
def _divide_rows(given: Any, share: Any, first: Any, rows: Any) -> None:
    """Write the parts of a block of rows of x."""
    steps = given.width // DEPTH
    for tile in range((rows + SIDE - 1) // SIDE):
        for step in range(steps):
            source = given.x + (first + tile * SIDE) * given.x_row + step * 4 * DEPTH
            target = share.tiles + (tile * steps + step) * PARTS * TILE_BYTES
            last = min(SIDE, rows - tile * SIDE) - 1
            _divide_tile(_RowTile(given.kind == BFLOAT16, source, given.x_row, last, target))


@njit
def _multiply_rows(given: Any, share: Any, first: Any, rows: Any) -> None:
    """Multiply a block of rows, which are divided, with all panels of a thread."""
    turn = _turn(given, share, share.first_panel, 0, share.first_panel)
    divided, next_divided = share.divided, share.divided + share.divided_bytes
    if given.kind != BFLOAT16 and turn.steps > 0:
        _divide_panel(_Lines(given.kind, turn.weights, turn.w_row, turn.steps, 0, divided))
    while turn.panel < share.last_panel:
        following = _following(given, share, turn)
        _multiply_turn(given, share, (first, rows), (turn, following), (divided, next_divided))
        turn, divided, next_divided = following, next_divided, divided


@njit
def _multiply_turn(given: Any, share: Any, block: Any, turns: Any, divided: Any) -> None:
    """Multiply one panel with a block of rows, and take the one of the next turn meanwhile.

    block: first row, and rows. divided: where the parts of both panels are.
    """
    (first, rows), (turn, following) = block, turns
    row_tiles, steps = (rows + SIDE - 1) // SIDE, given.width // DEPTH
    of_turn = (row_tiles + 1) // 2 * turn.steps
    lines = (PANEL * following.steps + of_turn - 1) // of_turn
    for tile in range(0, row_tiles, 2):
        both, sums = min(2, row_tiles - tile), share.waiting
        if given.block < given.width:
            sums += ((turn.panel - turn.group) * (row_tiles + 1) + tile) * 2 * TILE_BYTES
        _multiply_panel(
            _Panel(
                row_tiles=both,
                kind=given.kind,
                weights=turn.weights if given.kind == BFLOAT16 else divided[0],
                weight_row=turn.w_row,
                rows=share.tiles + (tile * steps + turn.column // DEPTH) * PARTS * TILE_BYTES,
                row_tile=steps * PARTS * TILE_BYTES,
                steps=turn.steps,
                sums=sums,
                is_first=np.int64(turn.column == 0),
                lines=lines,
                next_weights=following.weights,
                next_weight_row=following.w_row,
                next_steps=following.steps,
                next_start=tile // 2 * turn.steps * lines,
                next_to=divided[1],
            )
        )
        if turn.column + given.block < given.width:
            continue
        for i in range(2):
            for j in range(both):
                row = (tile + j) * SIDE
                y = turn.y + (first + row) * turn.y_row + i * SIDE * 4
                at = sums + (i * both + j) * TILE_BYTES
                _store_sums((at, y, turn.y_row, min(SIDE, rows - row)))


@partial(Loop, Products)
def multiply(given: Any, part: Any, parts: Any) -> None:
    """y = x w^T for x [T, width] in float32 and some matrices w [outputs, width].

    Threads divide rows among them, and outputs where rows are few: none waits for another. A thread
    takes its rows in blocks whose parts stay in its core's cache while panels of weights pass by,
    and wide ones in blocks of columns too.
    The order of a sum depends on the width alone.
    """
    row_groups = min(given.groups, parts)
    output_groups = parts // row_groups
    if part >= row_groups * output_groups:
        return
    memory, all_tiles = given.memory + part * given.share, (given.count + SIDE - 1) // SIDE
    _prepare(memory)
    divided = memory + 64 + given.rows * given.width * 2 * PARTS
    divided_bytes = given.block // DEPTH * _MOST_STEP_BYTES
    row_group, output_group = part // output_groups, part % output_groups
    share = _Share(
        first_panel=given.panels * output_group // output_groups,
        last_panel=given.panels * (output_group + 1) // output_groups,
        tiles=memory + 64,
        divided=divided,
        divided_bytes=divided_bytes,
        waiting=divided + 2 * divided_bytes,
    )
    last_row = min(all_tiles * (row_group + 1) // row_groups * SIDE, given.count)
    for first in range(all_tiles * row_group // row_groups * SIDE, last_row, given.rows):
        rows = min(given.rows, last_row - first)
        _divide_rows(given, share, first, rows)
        _multiply_rows(given, share, first, rows)
    _release(())


def scratch_bytes(rows: int, width: int, block: int) -> int:
    """Return the bytes of a thread's memory in `multiply`, whole lines of the cache; rows: of a
    block.
    """
    divided = 2 * (block // DEPTH) * _MOST_STEP_BYTES
    waiting = GROUP * (rows // SIDE + 1) if block < width else 2
    return 64 + rows * width * 2 * PARTS + divided + 2 * waiting * TILE_BYTES
