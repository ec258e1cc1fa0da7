"""Products in float32 by a processor's matrix unit (AMX), which multiplies bfloat16 numbers,
compiled.

The 24 significant bits of a float32 number are split into the first 8, the next 8 and the last 8:
three bfloat16 numbers, its parts, whose sum is the number:

    x = x1 + x2 + x3        y = x1 w + x2 w + x3 w        w in bfloat16

A weight in float16 has 11 bits and two parts, one in float32 three. Of the products of parts those
below 2^-24 of the first are left out: x3 w2, x2 w3, x3 w3. Products are exact and sums are in
float32, so y is as exact as a product in float32.

    tile      a register of 16 rows of 64 bytes, or as many bytes of memory
    step      32 columns of x and w, which one instruction multiplies: it adds to y^T [16 outputs,
              16 rows] the product of w [16 outputs, 32] and x^T [32, 16 rows], where the numbers of
              a row lie in pairs
    panel     32 outputs: two tiles of weights, times two tiles of x, are four sums
    line      one step of one output: 32 neighbouring weights

bfloat16 weights are read as they rest, and pairs are neighbours. Others are split, one panel ahead
of the unit; their pairs are numbers i and i + 16 of a step, in x too.
"""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from flexgen_helm.kernels.amx import MATRIX, PANEL_OUTPUTS, AmxArgs
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

TILE_ROWS = 16
STEP_COLUMNS = 32
ROW_BYTES = 64
TILE_BYTES = 1024
# Parts of a number of x.
X_PARTS = 3
# Of each part of a weight, the number of x's parts with which it is multiplied: for weights in
# bfloat16, float16, and float32.
WEIGHT_PARTS = ((3,), (3, 2), (3, 2, 1))
# Steps whose products are summed in a tile register. Longer chains of float32 sums lose digits
# where all terms have one sign.
CHAIN_STEPS = 16
# Panels that are multiplied with one block of columns before the next block.
GROUP_PANELS = 8
# How far ahead of the split weights are prefetched.
_PREFETCH_BYTES = 2048
# Numbers of the tile registers.
_SUM_TILES = (0, 1, 2, 3)
_WEIGHT_TILES = (4, 5)
_X_TILES = (6, 7)
_BYTE = ir.IntType(8)
_POINTER = _BYTE.as_pointer()
_INTEGERS = ir.VectorType(INT32, TILE_ROWS)


def _call(builder: Any, name: str, *arguments: Any) -> None:
    call_llvm(builder, f"llvm.x86.{name}", ir.VoidType(), *arguments)


def _load_tile(builder: Any, tile: int, address: Any, row_bytes: Any) -> None:
    _call(builder, "tileloadd64", _BYTE(tile), builder.inttoptr(address, _POINTER), row_bytes)


# Lines of a panel of weights in a block of columns, which has so many steps; `start` is the first
# line, counted from the panel's first, and their parts are written to `target`.
_WeightLines = namedtuple("_WeightLines", "dtype weights weight_stride steps start target")
# A panel of weights, in bfloat16 as they rest or else split, times one or two tiles of rows of x,
# over the steps of a block of columns. `x` is the address of the first tile's parts,
# `x_tile_stride` the distance to the second tile's. Of the next panel `lines` lines are split
# (`_split_lines`) in each step, from `next_start` on.
_PanelProduct = namedtuple(
    "_PanelProduct",
    "row_tiles dtype weights weight_stride x x_tile_stride steps sums is_first lines next_weights "
    "next_weight_stride next_steps next_start next_target",
)


@ir_statement((1, 2), (BFLOAT16, FLOAT16, FLOAT32))
def _multiply_panel(builder: Any, panel: Any) -> None:
    """Write the IR of a `_PanelProduct`. After every `CHAIN_STEPS` steps the tile registers are
    added to the sums in memory, and begin with zeros again. While the unit multiplies, the
    processor splits lines of the next panel.
    """
    sum_tiles = [_SUM_TILES[2 * i + j] for i in range(2) for j in range(panel.row_tiles)]
    chain_tile = builder.ptrtoint(
        cgutils.alloca_once(builder, ir.ArrayType(VECTOR, TILE_ROWS)), INT64
    )
    with cgutils.for_range_slice(builder, INT64(0), panel.steps, INT64(CHAIN_STEPS)) as (start, _):
        for tile in sum_tiles:
            _call(builder, "tilezero", _BYTE(tile))
        end = builder.add(start, INT64(CHAIN_STEPS))
        end = builder.select(builder.icmp_signed("<", end, panel.steps), end, panel.steps)
        with cgutils.for_range_slice(builder, start, end, INT64(1)) as (step, _):
            _multiply_step(builder, panel, step)
        has_sums = builder.or_(
            builder.icmp_signed("==", panel.is_first, INT64(0)),
            builder.icmp_signed("!=", start, INT64(0)),
        )
        for number, tile in enumerate(sum_tiles):
            chain_pointer = builder.inttoptr(chain_tile, _POINTER)
            _call(builder, "tilestored64", _BYTE(tile), chain_pointer, INT64(ROW_BYTES))
            sums = builder.add(panel.sums, INT64(TILE_BYTES * number))
            _add_tile(builder, chain_tile, sums, has_sums)


def _multiply_step(builder: Any, panel: Any, step: Any) -> None:
    """Multiply one step, and split some lines of the next panel."""
    dtype, pairs = panel.dtype, [(i, j) for i in range(2) for j in range(panel.row_tiles)]
    # Split weights are tiles, two of each part, one part after the other.
    is_split = dtype != BFLOAT16
    step_bytes = _step_bytes(dtype) if is_split else 2 * STEP_COLUMNS
    tile_bytes = (
        INT64(TILE_BYTES) if is_split else builder.mul(panel.weight_stride, INT64(TILE_ROWS))
    )
    weight_stride = INT64(ROW_BYTES) if is_split else panel.weight_stride
    weights = builder.add(panel.weights, builder.mul(step, INT64(step_bytes)))
    x_parts = builder.add(panel.x, builder.mul(step, INT64(X_PARTS * TILE_BYTES)))
    next_lines = _WeightLines(
        dtype,
        panel.next_weights,
        panel.next_weight_stride,
        panel.next_steps,
        panel.next_start,
        panel.next_target,
    )
    # Some lines behind each product of tiles, not all behind the last: the processor executes out
    # of order, but looks ahead no further than some products.
    products, all_products = 0, INT64(sum(WEIGHT_PARTS[dtype]))
    first_line = end = builder.mul(step, panel.lines)
    for parts in WEIGHT_PARTS[dtype]:
        for tile in _WEIGHT_TILES:
            _load_tile(builder, tile, weights, weight_stride)
            weights = builder.add(weights, tile_bytes)
        for part in range(parts):
            for j in range(panel.row_tiles):
                at = builder.add(x_parts, builder.mul(panel.x_tile_stride, INT64(j)))
                at = builder.add(at, INT64(TILE_BYTES * part))
                _load_tile(builder, _X_TILES[j], at, INT64(ROW_BYTES))
            for i, j in pairs:
                tiles = _SUM_TILES[2 * i + j], _WEIGHT_TILES[i], _X_TILES[j]
                _call(builder, "tdpbf16ps", *map(_BYTE, tiles))
            products += 1
            num_split = builder.udiv(builder.mul(panel.lines, INT64(products)), all_products)
            begin, end = end, builder.add(first_line, num_split)
            _split_lines(builder, next_lines, begin, end)


def _add_tile(builder: Any, tile: Any, sums: Any, has_sums: Any) -> None:
    """Add a tile in memory to the sums, or write it there if there are none."""
    for row in range(0, TILE_BYTES, ROW_BYTES):
        new = load(builder, builder.add(tile, INT64(row)), VECTOR, 4)
        target = builder.add(sums, INT64(row))
        total = builder.fadd(load(builder, target, VECTOR, 4), new)
        store(builder, builder.select(has_sums, total, new), target, 4)


def _step_bytes(dtype: int) -> int:
    """Return the bytes of a panel's split weights in one step. A cache line more than the tiles, so
    that the steps of a row do not fall into one set of the cache.
    """
    return 2 * len(WEIGHT_PARTS[dtype]) * TILE_BYTES + ROW_BYTES


@ir_statement()
def _configure_tiles(builder: Any, address: Any) -> None:
    """Configure the tile registers of this thread by the 64 bytes at an address."""
    _call(builder, "ldtilecfg", builder.inttoptr(address, _POINTER))


@ir_statement()
def _release_tiles(builder: Any) -> None:
    _call(builder, "tilerelease")


@ir_statement()
def _store_sums(builder: Any, tile: Any, y: Any, y_stride: Any, count: Any) -> None:
    """Store the first `count` columns of a tile [16 outputs, 16 rows] as rows of y."""
    outputs = [
        load(builder, builder.add(tile, INT64(ROW_BYTES * row)), VECTOR, 4)
        for row in range(TILE_ROWS)
    ]
    for row, vector in enumerate(transposed(builder, outputs)):
        with builder.if_then(builder.icmp_signed("<", INT64(row), count)):
            store(builder, vector, builder.add(y, builder.mul(y_stride, INT64(row))), 4)


def _split_pairs(builder: Any, halves: list[Any], count: int, in_order: int = 0) -> list[Any]:
    """Split 32 float32 numbers, in two vectors, into `count` parts in bfloat16; return a vector of
    pairs for each part.

    A part is the upper 16 bits of a number; what is left of the number is exact, and is split on.

    in_order: a pair is two neighbours; else a number of each vector, which takes fewer
    instructions.
    """
    words, shift = ir.VectorType(INT16, 2 * TILE_ROWS), ir.Constant(_INTEGERS, [16] * TILE_ROWS)
    mask = ir.Constant(_INTEGERS, [0xFFFF0000] * TILE_ROWS)
    odd = ir.Constant(
        ir.VectorType(INT32, 2 * TILE_ROWS), [2 * lane + 1 for lane in range(2 * TILE_ROWS)]
    )
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


# A step of up to 16 rows of x, whose last has the number `last`, and the address for its parts;
# in_order: see `_split_pairs`.
_XTile = namedtuple("_XTile", "in_order x x_stride last target")


@ir_statement((0, 1))
def _split_x_tile(builder: Any, x_tile: Any) -> None:
    """Write the IR of an `_XTile`: store a tile of each part; rows behind the last repeat it."""
    pairs: list[list[Any]] = [[] for _ in range(X_PARTS)]
    for row in range(TILE_ROWS):
        inside = builder.icmp_signed("<", INT64(row), x_tile.last)
        number = builder.select(inside, INT64(row), x_tile.last)
        at = builder.add(x_tile.x, builder.mul(x_tile.x_stride, number))
        halves = [
            load(builder, builder.add(at, INT64(ROW_BYTES * half)), VECTOR, 4) for half in range(2)
        ]
        for part, joined in enumerate(_split_pairs(builder, halves, X_PARTS, x_tile.in_order)):
            pairs[part].append(joined)
    for part, rows in enumerate(pairs):
        for row, vector in enumerate(transposed(builder, rows)):
            at = builder.add(x_tile.target, INT64(TILE_BYTES * part + ROW_BYTES * row))
            store(builder, vector, at, 4)


@ir_statement((FLOAT16, FLOAT32))
def _split_panel(builder: Any, lines: Any) -> None:
    """Split all lines of a panel at once: the first one, while none is multiplied."""
    _split_lines(builder, lines, INT64(0), builder.mul(lines.steps, INT64(PANEL_OUTPUTS)))


def _split_lines(builder: Any, lines: Any, first: Any, last: Any) -> None:
    """Write the IR of a loop that splits the lines first … last - 1, counted from `lines.start`, in
    the order in which they lie in memory. Lines in bfloat16, which need no split, are prefetched.

    Lines behind the panel's end are left out.
    """
    steps, element = lines.steps, 4 if lines.dtype == FLOAT32 else 2
    first, last = builder.add(first, lines.start), builder.add(last, lines.start)
    end = builder.mul(steps, INT64(PANEL_OUTPUTS))
    last = builder.select(builder.icmp_signed("<", last, end), last, end)
    head, loop, done = (builder.append_basic_block() for _ in range(3))
    builder.cbranch(builder.icmp_signed("<", first, last), head, done)
    builder.position_at_end(head)
    first_row = builder.udiv(first, steps)
    first_step = builder.sub(first, builder.mul(first_row, steps))
    builder.branch(loop)
    builder.position_at_end(loop)
    number, row, step = (builder.phi(INT64) for _ in range(3))
    for phi, value in zip((number, row, step), (first, first_row, first_step)):
        phi.add_incoming(value, head)
    line = builder.add(
        builder.add(lines.weights, builder.mul(lines.weight_stride, row)),
        builder.mul(step, INT64(element * STEP_COLUMNS)),
    )
    if lines.dtype == BFLOAT16:
        prefetch(builder, line, 2)
    else:
        # Rows of the second tile follow the 16 of the first one.
        in_tiles = builder.add(
            builder.mul(row, INT64(ROW_BYTES)), builder.mul(step, INT64(_step_bytes(lines.dtype)))
        )
        _split_line(builder, lines.dtype, line, builder.add(lines.target, in_tiles))
    next_line, next_step = builder.add(number, INT64(1)), builder.add(step, INT64(1))
    is_end = builder.icmp_signed("==", next_step, steps)
    number.add_incoming(next_line, loop)
    row.add_incoming(builder.select(is_end, builder.add(row, INT64(1)), row), loop)
    step.add_incoming(builder.select(is_end, INT64(0), next_step), loop)
    builder.cbranch(builder.icmp_signed("<", next_line, last), loop, done)
    builder.position_at_end(done)


def _split_line(builder: Any, dtype: int, line: Any, target: Any) -> None:
    """Write the IR that splits one line and stores its parts in the tiles of the next panel."""
    element, vector = (
        (4, VECTOR) if dtype == FLOAT32 else (2, ir.VectorType(ir.HalfType(), TILE_ROWS))
    )
    for ahead in range(0, element * STEP_COLUMNS, ROW_BYTES):
        prefetch(builder, builder.add(line, INT64(_PREFETCH_BYTES + ahead)))
    halves = [
        load(builder, builder.add(line, INT64(element * TILE_ROWS * half)), vector, element)
        for half in range(2)
    ]
    halves = [builder.fpext(half, VECTOR) for half in halves] if dtype == FLOAT16 else halves
    for part, joined in enumerate(_split_pairs(builder, halves, len(WEIGHT_PARTS[dtype]))):
        store(builder, joined, builder.add(target, INT64(2 * TILE_BYTES * part)), ROW_BYTES)


@njit
def _prepare_tiles(scratch: Any) -> None:
    """Configure the tile registers of this thread: 16 rows of 64 bytes each. The first 64 bytes of
    the scratch memory are written for that.
    """
    shape = integers(scratch, 8)
    shape[:] = 0
    shape[0] = 1  # the palette; then the bytes of a row and the rows of each register
    shape[2:4] = ROW_BYTES << 48 | ROW_BYTES << 32 | ROW_BYTES << 16 | ROW_BYTES
    shape[6] = 0x1010101010101010
    _configure_tiles((scratch,))


_MAX_STEP_BYTES = _step_bytes(FLOAT32)
# Of one column of two panels that are split, in float16.
PANEL_BYTES = 2 * _step_bytes(FLOAT16) // STEP_COLUMNS


# The panels of a thread, and addresses in its scratch memory: of x's parts, of two panels of split
# weights, each of `split_bytes`, and of the sums, which wait there for the next block of columns.
_ThreadWork = namedtuple("_ThreadWork", "first_panel end_panel x_parts split split_bytes sums")
# The weights of a panel in a block of columns, and the address of its first output in y. `group` is
# the first of the `GROUP_PANELS` panels that are multiplied before the next block of columns.
_PanelBlock = namedtuple("_PanelBlock", "group column panel weights w_stride steps y y_stride")


@njit
def _panel_block(args: Any, work: Any, group: Any, column: Any, panel: Any) -> Any:
    """Return a panel in the block of columns that begins at `column`; without steps if it is behind
    the thread's last panel.
    """
    matrices = records(args.matrices, args.num_matrices, MATRIX)
    matrix, number = 0, min(panel, work.end_panel - 1)
    while number >= matrices[matrix].panels:
        number -= matrices[matrix].panels
        matrix += 1
    record, element = matrices[matrix], 4 if args.dtype == FLOAT32 else 2
    # The last panel of a matrix is whole: it computes some outputs of the one before it again.
    output = min(number * PANEL_OUTPUTS, record.outputs - PANEL_OUTPUTS)
    steps = min(args.block_columns, args.width - column) // STEP_COLUMNS
    return _PanelBlock(
        group=group,
        column=column,
        panel=panel,
        weights=record.w + output * record.w_stride + column * element,
        w_stride=record.w_stride,
        steps=steps if panel < work.end_panel else 0,
        y=record.y + output * 4,
        y_stride=record.outputs * 4,
    )


@njit
def _next_panel_block(args: Any, work: Any, current: Any) -> Any:
    """Return what is multiplied after `current`: the group's next panel; behind its last, its first
    panel in the next block of columns; behind the last block, the next group's first panel.
    """
    group, column, panel = current.group, current.column, current.panel + 1
    group_panels = GROUP_PANELS if args.block_columns < args.width else max(1, args.panels)
    if panel >= min(group + group_panels, work.end_panel):
        column += args.block_columns
        if column >= args.width:
            group, column = group + group_panels, 0
        panel = group
    return _panel_block(args, work, group, column, panel)


@njit
def _split_x_rows(args: Any, work: Any, first: Any, rows: Any) -> None:
    """Split the rows first … first + rows - 1 of x, all columns."""
    steps = args.width // STEP_COLUMNS
    for tile in range((rows + TILE_ROWS - 1) // TILE_ROWS):
        for step in range(steps):
            source = args.x + (first + tile * TILE_ROWS) * args.x_stride + step * 4 * STEP_COLUMNS
            target = work.x_parts + (tile * steps + step) * X_PARTS * TILE_BYTES
            last = min(TILE_ROWS, rows - tile * TILE_ROWS) - 1
            _split_x_tile(_XTile(args.dtype == BFLOAT16, source, args.x_stride, last, target))


@njit
def _multiply_rows(args: Any, work: Any, first: Any, rows: Any) -> None:
    """Multiply a block of rows, whose parts were written before, with all panels of the thread."""
    current = _panel_block(args, work, work.first_panel, 0, work.first_panel)
    split, next_split = work.split, work.split + work.split_bytes
    if args.dtype != BFLOAT16 and current.steps > 0:
        _split_panel(
            _WeightLines(args.dtype, current.weights, current.w_stride, current.steps, 0, split)
        )
    while current.panel < work.end_panel:
        following = _next_panel_block(args, work, current)
        _multiply_panel_block(args, work, (first, rows), (current, following), (split, next_split))
        current, split, next_split = following, next_split, split


@njit
def _multiply_panel_block(
    args: Any, work: Any, rows_of_block: Any, panel_blocks: Any, split: Any
) -> None:
    """Multiply a panel with a block of rows, and split the next panel meanwhile.

    rows_of_block: the first row, and how many.
    panel_blocks: the panel that is multiplied, and the next one.
    split: the addresses of the split weights of both.
    """
    (first, rows), (current, following) = rows_of_block, panel_blocks
    row_tiles, steps = (rows + TILE_ROWS - 1) // TILE_ROWS, args.width // STEP_COLUMNS
    first_step = current.column // STEP_COLUMNS
    panel_steps = (row_tiles + 1) // 2 * current.steps
    lines = (PANEL_OUTPUTS * following.steps + panel_steps - 1) // panel_steps
    for tile in range(0, row_tiles, 2):
        num_tiles, sums = min(2, row_tiles - tile), work.sums
        if args.block_columns < args.width:
            sums += ((current.panel - current.group) * (row_tiles + 1) + tile) * 2 * TILE_BYTES
        _multiply_panel(
            _PanelProduct(
                row_tiles=num_tiles,
                dtype=args.dtype,
                weights=current.weights if args.dtype == BFLOAT16 else split[0],
                weight_stride=current.w_stride,
                x=work.x_parts + (tile * steps + first_step) * X_PARTS * TILE_BYTES,
                x_tile_stride=steps * X_PARTS * TILE_BYTES,
                steps=current.steps,
                sums=sums,
                is_first=np.int64(current.column == 0),
                lines=lines,
                next_weights=following.weights,
                next_weight_stride=following.w_stride,
                next_steps=following.steps,
                next_start=tile // 2 * current.steps * lines,
                next_target=split[1],
            )
        )
        if current.column + args.block_columns < args.width:
            continue
        for i in range(2):
            for j in range(num_tiles):
                row = (tile + j) * TILE_ROWS
                y = current.y + (first + row) * current.y_stride + i * TILE_ROWS * 4
                tile_sums = sums + (i * num_tiles + j) * TILE_BYTES
                _store_sums((tile_sums, y, current.y_stride, min(TILE_ROWS, rows - row)))


@partial(Loop, AmxArgs)
def multiply(args: Any, thread: Any, threads: Any) -> None:
    """Compute y = x w^T for x [T, width] in float32 and each of some matrices w [outputs, width].

    Threads divide the rows among them, and, where these are few, the panels too: none waits for
    another. A thread takes its rows in blocks whose parts stay in its core's cache while panels of
    weights pass by, and wide rows in blocks of columns too.
    The order of a sum depends on the width alone.
    """
    row_groups = min(args.row_groups, threads)
    output_groups = threads // row_groups
    if thread >= row_groups * output_groups:
        return
    scratch = args.scratch + thread * args.scratch_bytes
    all_tiles = (args.x_rows + TILE_ROWS - 1) // TILE_ROWS
    _prepare_tiles(scratch)
    split = scratch + 64 + args.block_rows * args.width * 2 * X_PARTS
    split_bytes = args.block_columns // STEP_COLUMNS * _MAX_STEP_BYTES
    row_group, output_group = thread // output_groups, thread % output_groups
    work = _ThreadWork(
        first_panel=args.panels * output_group // output_groups,
        end_panel=args.panels * (output_group + 1) // output_groups,
        x_parts=scratch + 64,
        split=split,
        split_bytes=split_bytes,
        sums=split + 2 * split_bytes,
    )
    last_row = min(all_tiles * (row_group + 1) // row_groups * TILE_ROWS, args.x_rows)
    for first in range(all_tiles * row_group // row_groups * TILE_ROWS, last_row, args.block_rows):
        rows = min(args.block_rows, last_row - first)
        _split_x_rows(args, work, first, rows)
        _multiply_rows(args, work, first, rows)
    _release_tiles(())


def scratch_bytes(rows: int, width: int, block_columns: int) -> int:
    """Return the bytes of a thread's scratch memory in `multiply`, whole cache lines.

    rows, block_columns: of a block.
    """
    split = 2 * (block_columns // STEP_COLUMNS) * _MAX_STEP_BYTES
    sum_tiles = GROUP_PANELS * (rows // TILE_ROWS + 1) if block_columns < width else 2
    return 64 + rows * width * 2 * X_PARTS + split + 2 * sum_tiles * TILE_BYTES
