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

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.emit import (
    INT16,
    INT32,
    INT64,
    VECTOR,
    Loop,
    call_llvm,
    done,
    integers,
    ir_statement,
    load,
    njit,
    operands,
    part_of_thread,
    prefetch,
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


@ir_statement((1, 2), (BFLOAT16, FLOAT16, FLOAT32))
def _multiply_panel(builder: Any, row_tiles: int, kind: int, *operands: Any) -> None:
    """The product of a panel of weights with one or two tiles of rows, over all steps of a block of
    columns.

    Every `CHAIN_STEPS` the tiles are added to the sums in memory, and begin with zeros again.
    While the unit multiplies, the processor takes lines of the panel that is next (`_take_lines`).
    """
    weights, weight_row, rows, row_tile, steps, sums, is_first, lines, *following_panel = operands
    used = [_SUMS[2 * i + j] for i in range(2) for j in range(row_tiles)]
    # Weights of several parts were divided before: two tiles of each part follow each other.
    is_divided = kind != BFLOAT16
    step_bytes = _step_bytes(kind) if is_divided else 2 * DEPTH
    tile_bytes = INT64(TILE_BYTES) if is_divided else builder.mul(weight_row, INT64(SIDE))
    weight_row = INT64(ROW_BYTES) if is_divided else weight_row
    chain_sums = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(VECTOR, SIDE)), INT64)
    with cgutils.for_range_slice(builder, INT64(0), steps, INT64(CHAIN_STEPS)) as (start, _):
        for tile in used:
            _call(builder, "tilezero", _BYTE(tile))
        end = builder.add(start, INT64(CHAIN_STEPS))
        end = builder.select(builder.icmp_signed("<", end, steps), end, steps)
        with cgutils.for_range_slice(builder, start, end, INT64(1)) as (step, _):
            weights_at = builder.add(weights, builder.mul(step, INT64(step_bytes)))
            rows_at = builder.add(rows, builder.mul(step, INT64(PARTS * TILE_BYTES)))
            # Some lines behind each product of tiles: the processor looks ahead no further than
            # some of these.
            products, all_products = 0, INT64(sum(WEIGHT_PARTS[kind]))
            first_line = last_line = builder.mul(step, lines)
            for parts in WEIGHT_PARTS[kind]:
                for tile in _WEIGHTS:
                    _load_tile(builder, tile, weights_at, weight_row)
                    weights_at = builder.add(weights_at, tile_bytes)
                for part in range(parts):
                    for j in range(row_tiles):
                        at = builder.add(rows_at, builder.mul(row_tile, INT64(j)))
                        _load_tile(
                            builder,
                            _ROWS[j],
                            builder.add(at, INT64(TILE_BYTES * part)),
                            INT64(ROW_BYTES),
                        )
                    for i, j in ((i, j) for i in range(2) for j in range(row_tiles)):
                        _call(
                            builder,
                            "tdpbf16ps",
                            *map(_BYTE, (_SUMS[2 * i + j], _WEIGHTS[i], _ROWS[j])),
                        )
                    products += 1
                    taken = builder.udiv(builder.mul(lines, INT64(products)), all_products)
                    line, last_line = last_line, builder.add(first_line, taken)
                    _take_lines(builder, kind, line, last_line, following_panel)
        has_sums = builder.or_(
            builder.icmp_signed("==", is_first, INT64(0)),
            builder.icmp_signed("!=", start, INT64(0)),
        )
        for number, tile in enumerate(used):
            _call(
                builder,
                "tilestored64",
                _BYTE(tile),
                builder.inttoptr(chain_sums, _POINTER),
                INT64(ROW_BYTES),
            )
            _add_tile(builder, chain_sums, builder.add(sums, INT64(TILE_BYTES * number)), has_sums)


def _add_tile(builder: Any, tile: Any, sums: Any, has_sums: Any) -> None:
    """Add a tile in memory to the sums, or write it there if there are none."""
    for row in range(0, TILE_BYTES, ROW_BYTES):
        new, target = (
            load(builder, builder.add(tile, INT64(row)), VECTOR, 4),
            builder.add(sums, INT64(row)),
        )
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


@ir_statement((0, 1))
def _divide_tile(builder: Any, in_order: int, x: Any, x_row: Any, last: Any, to: Any) -> None:
    """Write a tile of each part of x [16 rows, 32 columns]; rows behind the last one repeat it."""
    pairs: list[list[Any]] = [[] for _ in range(PARTS)]
    for row in range(SIDE):
        inside = builder.icmp_signed("<", INT64(row), last)
        at = builder.add(x, builder.mul(x_row, builder.select(inside, INT64(row), last)))
        halves = [
            load(builder, builder.add(at, INT64(ROW_BYTES * half)), VECTOR, 4) for half in range(2)
        ]
        for part, joined in enumerate(_parts_of(builder, halves, PARTS, in_order)):
            pairs[part].append(joined)
    for part, rows in enumerate(pairs):
        for row, vector in enumerate(transposed(builder, rows)):
            store(builder, vector, builder.add(to, INT64(TILE_BYTES * part + ROW_BYTES * row)), 4)


@ir_statement((FLOAT16, FLOAT32))
def _divide_panel(builder: Any, kind: int, *panel: Any) -> None:
    """Divide a panel at once, where none is multiplied meanwhile."""
    _take_lines(builder, kind, INT64(0), builder.mul(panel[2], INT64(PANEL)), panel)


def _take_lines(builder: Any, kind: int, first: Any, last: Any, panel: Any) -> None:
    """Emit a loop over lines of a panel, of 32 columns, in the order in which they lie in memory.

    Lines in bfloat16 are only asked for. Others are divided: two tiles of each part, step by step.

    first, last: lines, counted from the panel's start; those behind its end are none.
    panel: weights, bytes of their rows, steps, start, and where parts go.
    """
    weights, weight_row, steps, start, to = panel
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
    for phi, value in zip((number, row, step), (first, first_row, first_step)):
        phi.add_incoming(value, head)
    line = builder.add(
        builder.add(weights, builder.mul(weight_row, row)),
        builder.mul(step, INT64(element * DEPTH)),
    )
    if kind == BFLOAT16:
        prefetch(builder, line, 2)
    else:
        # Rows of the second tile follow the 16 of the first one.
        in_tiles = builder.add(
            builder.mul(row, INT64(ROW_BYTES)), builder.mul(step, INT64(_step_bytes(kind)))
        )
        target = builder.add(to, in_tiles)
        for ahead in range(0, element * DEPTH, ROW_BYTES):
            prefetch(builder, builder.add(line, INT64(_AHEAD + ahead)))
        halves = [
            load(builder, builder.add(line, INT64(element * SIDE * half)), vector, element)
            for half in range(2)
        ]
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
    shape = integers(memory, 8)
    shape[:] = 0
    shape[0] = 1  # the palette; then the bytes of a row and the rows of each register
    shape[2:4] = ROW_BYTES << 48 | ROW_BYTES << 32 | ROW_BYTES << 16 | ROW_BYTES
    shape[6] = 0x1010101010101010
    _configure((memory,))


_MOST_STEP_BYTES = _step_bytes(FLOAT32)
# Of a column of two panels in float16 that are divided.
PANEL_BYTES = 2 * _step_bytes(FLOAT16) // DEPTH


@njit
def _matrix(panels: Any, outputs: Any, number: Any) -> Any:
    """Find which matrix the panel with this number is of, and its first output there."""
    matrix = 0
    while number >= panels[matrix]:
        number -= panels[matrix]
        matrix += 1
    # The last panel of a matrix is whole: it computes some outputs of the one before it again.
    return matrix, min(number * PANEL, outputs[matrix] - PANEL)


@Loop
def multiply(address: Any) -> None:
    """y = x w^T for x [T, width] in float32 and some matrices w [outputs, width].

    Threads divide rows among them, and outputs where rows are few: none waits for another. A thread
    takes its rows in blocks whose parts stay in its core's cache while panels of weights pass by,
    and wide ones in blocks of columns too.
    The order of a sum depends on the width alone.

    Arguments: kind of the weights, x, bytes of its rows, T, width and columns of a block (multiples
    of 32), rows of a block (a multiple of 16), groups of threads with different rows, memory, bytes
    of a thread's share of it (`scratch_bytes`), panels of all matrices, matrices, and a table of
    six rows with a number for each of them: w, bytes of its rows, y, bytes of its rows, outputs (at
    least 32), panels.
    """
    part, parts = part_of_thread(address)
    (
        kind,
        x,
        x_row,
        all_rows,
        width,
        block,
        block_rows,
        most_groups,
        memory,
        share,
        panels,
        count,
        numbers,
    ) = operands(address, 13)
    table = integers(numbers, 6 * count).reshape((6, count))
    row_groups = min(most_groups, parts)
    output_groups = parts // row_groups
    if part >= row_groups * output_groups:
        done(address, part)
        return
    memory += part * share
    _prepare(memory)
    steps, all_tiles, element = (
        width // DEPTH,
        (all_rows + SIDE - 1) // SIDE,
        4 if kind == FLOAT32 else 2,
    )
    row_group, output_group = part // output_groups, part % output_groups
    last_row = min(all_tiles * (row_group + 1) // row_groups * SIDE, all_rows)
    first_panel, last_panel = (
        panels * output_group // output_groups,
        panels * (output_group + 1) // output_groups,
    )
    tiles = memory + 64
    divided = tiles + block_rows * steps * 2 * DEPTH * PARTS
    divided_bytes = block // DEPTH * _MOST_STEP_BYTES
    waiting = divided + 2 * divided_bytes
    group_panels = GROUP if block < width else max(1, panels)
    for first in range(all_tiles * row_group // row_groups * SIDE, last_row, block_rows):
        rows = min(block_rows, last_row - first)
        row_tiles = (rows + SIDE - 1) // SIDE
        pairs = (row_tiles + 1) // 2
        for tile in range(row_tiles):
            for step in range(steps):
                source = x + (first + tile * SIDE) * x_row + step * 4 * DEPTH
                target = tiles + (tile * steps + step) * PARTS * TILE_BYTES
                _divide_tile(
                    (kind == BFLOAT16, source, x_row, min(SIDE, rows - tile * SIDE) - 1, target)
                )
        turn, group, column, panel = 0, first_panel, 0, first_panel
        matrix, output = _matrix(table[5], table[4], panel)
        if kind != BFLOAT16 and panel < last_panel:
            row_bytes, block_steps = table[1, matrix], min(block, width) // DEPTH
            _divide_panel(
                (kind, table[0, matrix] + output * row_bytes, row_bytes, block_steps, 0, divided)
            )
        while panel < last_panel:
            # Behind it: one of its group, else the group's first in the next columns, else the next
            # group's.
            next_group, next_column, next_panel = group, column, panel + 1
            if next_panel >= min(group + group_panels, last_panel):
                next_column += block
                if next_column >= width:
                    next_group, next_column = group + group_panels, 0
                next_panel = next_group
            next_matrix, next_output = matrix, output
            if next_panel < last_panel:
                next_matrix, next_output = _matrix(table[5], table[4], next_panel)
            row_bytes, next_row_bytes = table[1, matrix], table[1, next_matrix]
            weights = table[0, matrix] + output * row_bytes + column * element
            next_weights = (
                table[0, next_matrix] + next_output * next_row_bytes + next_column * element
            )
            block_steps = min(block, width - column) // DEPTH
            next_steps = min(block, width - next_column) // DEPTH if next_panel < last_panel else 0
            if kind != BFLOAT16:
                weights = divided + turn * divided_bytes
            target = divided + (1 - turn) * divided_bytes
            lines = (PANEL * next_steps + pairs * block_steps - 1) // (pairs * block_steps)
            y, y_row = table[2, matrix], table[3, matrix]
            for tile in range(0, row_tiles, 2):
                both = min(2, row_tiles - tile)
                sums = waiting
                if block < width:
                    sums += ((panel - group) * (row_tiles + 1) + tile) * 2 * TILE_BYTES
                operand = (
                    weights,
                    row_bytes,
                    tiles + (tile * steps + column // DEPTH) * PARTS * TILE_BYTES,
                )
                sizes = steps * PARTS * TILE_BYTES, block_steps, sums, column == 0, lines
                following = (
                    next_weights,
                    next_row_bytes,
                    next_steps,
                    tile // 2 * block_steps * lines,
                    target,
                )
                _multiply_panel((both, kind) + operand + sizes + following)
                if column + block < width:
                    continue
                for i in range(2):
                    for j in range(both):
                        row = first + (tile + j) * SIDE
                        to = y + row * y_row + (output + i * SIDE) * 4
                        _store_sums(
                            (
                                sums + (i * both + j) * TILE_BYTES,
                                to,
                                y_row,
                                min(SIDE, last_row - row),
                            )
                        )
            group, column, panel = next_group, next_column, next_panel
            turn, matrix, output = 1 - turn, next_matrix, next_output
    _release(())
    done(address, part)


def scratch_bytes(rows: int, width: int, block: int) -> int:
    """Return the bytes of a thread's memory in `multiply`, whole lines of the cache; rows: of a
    block.
    """
    divided = 2 * (block // DEPTH) * _MOST_STEP_BYTES
    waiting = GROUP * (rows // SIDE + 1) if block < width else 2
    return 64 + rows * width * 2 * PARTS + divided + 2 * waiting * TILE_BYTES
