"""The Gluon kernel behind `wgrad_hopper`: its two roles and what they share. Needs Triton 3.6.

One persistent program per processor. Two warpgroups multiply and ask the copy engine for dy and x, further
warps update weight and moments; the gradient of a finished tile goes from the first to the second through
shared memory in fp32, so the tensor cores stop for that copy only.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .rounding import hash_seed, lane_seed
from .rules import load_state, update_elements
from .tiles import tile_order

__all__ = ["descriptor", "wgrad_hopper_kernel"]


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know to copy blocks of a matrix."""
    return TensorDescriptor.from_tensor(tensor, [rows, columns], _block_layout(rows, columns, tensor.dtype))


@functools.cache
def _block_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    types = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([rows, columns], types[dtype])


@gluon.jit
def _load_blocks(dy_desc, x_desc, dy_ring, x_ring, ready, stage, t, n, k, more):
    """Ask for one stage: rows from `t` of dy and x, columns from `n` and `k`; nothing unless `more`."""
    bar = ready.index(stage)
    mbarrier.expect(bar, dy_desc.block_type.nbytes + x_desc.block_type.nbytes, pred=more)
    tma.async_copy_global_to_shared(dy_desc, [t, n], bar, dy_ring.index(stage), pred=more)
    tma.async_copy_global_to_shared(x_desc, [t, k], bar, x_ring.index(stage), pred=more)


@gluon.jit
def _multiply(
    dy_desc, x_desc, dy_ring, x_ring, ready, gradient, full, free, T, tiles_n, tiles_k,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr, GROUP: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Gradients of every tile of this program into `gradient`."""
    STAGES: gl.constexpr = dy_ring.shape[0]
    tiles = tiles_n * tiles_k
    # The stages are filled in the order of use, across the end of a tile.
    load_tile = gl.program_id(0)
    load_n, load_k = tile_order(load_tile, tiles_n, tiles_k, GROUP)
    load_t = 0
    for load_stage in gl.static_range(STAGES - 1):
        _load_blocks(
            dy_desc, x_desc, dy_ring, x_ring, ready, load_stage, load_t, load_n * BLOCK_N, load_k * BLOCK_K,
            load_tile < tiles,
        )  # fmt: skip
        load_t += BLOCK_T
        if load_t >= T:
            load_t = 0
            load_tile += gl.num_programs(0)
            load_n, load_k = tile_order(load_tile, tiles_n, tiles_k, GROUP)
    stage = 0
    phase = 0
    gradient_phase = 1  # a new barrier counts as having completed the phase before its first
    before = STAGES - 1
    acc = gl.zeros((BLOCK_N, BLOCK_K), gl.float32, LAYOUT)
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for t in range(0, T, BLOCK_T):
            mbarrier.wait(ready.index(stage), phase)
            acc = warpgroup_mma(
                dy_ring.index(stage).permute((1, 0)), x_ring.index(stage), acc,
                use_acc=t > 0, is_async=True,
            )  # fmt: skip
            # The product before this one is done then, and its stage free.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            gl.thread_barrier()
            _load_blocks(
                dy_desc, x_desc, dy_ring, x_ring, ready, before, load_t, load_n * BLOCK_N, load_k * BLOCK_K,
                load_tile < tiles,
            )  # fmt: skip
            load_t += BLOCK_T
            # The order of tiles takes two integer divisions, too long for every round.
            if load_t >= T:
                load_t = 0
                load_tile += gl.num_programs(0)
                load_n, load_k = tile_order(load_tile, tiles_n, tiles_k, GROUP)
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.wait(free, gradient_phase)
        gradient.store(acc)
        mbarrier.arrive(full, count=1)
        gradient_phase ^= 1


@gluon.jit
def _ask_rows(w_desc, m_desc, v_desc, w_ring, m_ring, v_ring, asked, slot, n, k, more):
    """Ask for rows from `n` of weight and moments, columns from `k`, into one slot; nothing unless `more`."""
    bar = asked.index(slot)
    size: gl.constexpr = (
        w_desc.block_type.nbytes
        + (m_desc.block_type.nbytes if m_desc is not None else 0)
        + (v_desc.block_type.nbytes if v_desc is not None else 0)
    )
    mbarrier.expect(bar, size, pred=more)
    tma.async_copy_global_to_shared(w_desc, [n, k], bar, w_ring.index(slot), pred=more)
    if m_desc is not None:
        tma.async_copy_global_to_shared(m_desc, [n, k], bar, m_ring.index(slot), pred=more)
    if v_desc is not None:
        tma.async_copy_global_to_shared(v_desc, [n, k], bar, v_ring.index(slot), pred=more)


@gluon.jit
def _update_tiles(
    gradient, full, free, w_desc, m_desc, v_desc, w_ring, m_ring, v_ring, asked,
    w_ptr, m_ptr, v_ptr, coefficient_ptr, numbers_ptr, norm_ptr, tiles_n, tiles_k, K, rng_key,
    RULE: gl.constexpr, NESTEROV: gl.constexpr, STOCHASTIC: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Update weight and moments by the gradients that arrive, `ROWS` rows at a time."""
    ROWS: gl.constexpr = gradient.shape[1]
    SLICES: gl.constexpr = gradient.shape[0]
    SLOTS: gl.constexpr = w_ring.shape[0]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    # A row of the tile is aligned to its length, so no 32-bit block of the hash ends inside.
    lanes = lane_seed(lane)
    tiles = tiles_n * tiles_k
    pid_n, pid_k = tile_order(gl.program_id(0), tiles_n, tiles_k, GROUP)
    n = pid_n * BLOCK_N
    k = pid_k * BLOCK_K
    for slot in gl.static_range(SLOTS):
        _ask_rows(w_desc, m_desc, v_desc, w_ring, m_ring, v_ring, asked, slot, n + slot * ROWS, k, True)
    slot = 0
    slot_phase = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        following = tile + gl.num_programs(0)
        pid_n, pid_k = tile_order(following, tiles_n, tiles_k, GROUP)
        next_n = pid_n * BLOCK_N
        next_k = pid_k * BLOCK_K
        mbarrier.wait(full, phase)
        phase ^= 1
        norm_sq = 0.0
        for part in range(SLICES):
            mbarrier.wait(asked.index(slot), slot_phase)
            g = gradient.index(part).load(LAYOUT)
            w = w_ring.index(slot).load(LAYOUT)
            m = w
            v = w
            if m_desc is not None:
                m = m_ring.index(slot).load(LAYOUT)
            if v_desc is not None:
                v = v_ring.index(slot).load(LAYOUT)
            gl.thread_barrier()
            inside = part < SLICES - SLOTS
            ask_n = gl.where(inside, n, next_n - SLICES * ROWS) + (part + SLOTS) * ROWS
            _ask_rows(
                w_desc, m_desc, v_desc, w_ring, m_ring, v_ring, asked, slot, ask_n,
                gl.where(inside, k, next_k), inside | (following < tiles),
            )  # fmt: skip
            mbarrier.arrive(free, count=1, pred=part == SLICES - 1)
            slot += 1
            if slot == SLOTS:
                slot = 0
                slot_phase ^= 1
            if norm_ptr is not None:
                norm_sq += gl.sum(gl.sum(g * g, 1), 0)
            first = (n + part * ROWS + row).to(gl.int64) * K + k
            update_elements(
                g, w, w, m, v, w, w, w_ptr, None, m_ptr, v_ptr, None, None, coefficient_ptr, numbers_ptr,
                first[:, None] + lane[None, :], None, None, None,
                hash_seed(first, rng_key)[:, None] + lanes[None, :], RULE, NESTEROV, STOCHASTIC, False,
            )  # fmt: skip
        if norm_ptr is not None:
            gl.store(norm_ptr + tile, norm_sq)
        n = next_n
        k = next_k


@gluon.jit
def _load_rows(w_ptr, m_ptr, v_ptr, offset):
    """Weight and moments, which are stored as they are."""
    w, low, m, v, m_scale, v_scale = load_state(
        w_ptr, None, m_ptr, v_ptr, None, None, offset, None, None, None
    )
    return w, m, v


@gluon.jit
def _update_tiles_direct(
    gradient, full, free, w_ptr, m_ptr, v_ptr, coefficient_ptr, numbers_ptr, norm_ptr, tiles_n, tiles_k, K,
    rng_key,
    RULE: gl.constexpr, NESTEROV: gl.constexpr, STOCHASTIC: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The same with weight and moments loaded into registers, which leaves shared memory to dy and x."""
    ROWS: gl.constexpr = gradient.shape[1]
    SLICES: gl.constexpr = gradient.shape[0]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    lane = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    # A row of the tile is aligned to its length, so no 32-bit block of the hash ends inside.
    lanes = lane_seed(lane)
    tiles = tiles_n * tiles_k
    phase = 0
    pid_n, pid_k = tile_order(gl.program_id(0), tiles_n, tiles_k, GROUP)
    first = (pid_n * BLOCK_N + row).to(gl.int64) * K + pid_k * BLOCK_K
    w, m, v = _load_rows(w_ptr, m_ptr, v_ptr, first[:, None] + lane[None, :])
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        following = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        next_n, next_k = tile_order(following, tiles_n, tiles_k, GROUP)
        mbarrier.wait(full, phase)
        phase ^= 1
        norm_sq = 0.0
        # Weight and moments are asked for one round before their use. Two rounds are written out because the
        # registers of a load are not moved without waiting for it.
        for part in range(0, SLICES, 2):
            odd = first + (ROWS * K).to(gl.int64)
            odd_w, odd_m, odd_v = _load_rows(w_ptr, m_ptr, v_ptr, odd[:, None] + lane[None, :])
            # The assembler moves loads behind arithmetic that could hide them, unless what the arithmetic
            # needs is read after a barrier.
            gl.thread_barrier()
            g = gradient.index(part).load(LAYOUT)
            if norm_ptr is not None:
                norm_sq += gl.sum(gl.sum(g * g, 1), 0)
            update_elements(
                g, w, w, m, v, w, w, w_ptr, None, m_ptr, v_ptr, None, None, coefficient_ptr, numbers_ptr,
                first[:, None] + lane[None, :], None, None, None,
                hash_seed(first, rng_key)[:, None] + lanes[None, :], RULE, NESTEROV, STOCHASTIC, False,
            )  # fmt: skip
            if part < SLICES - 2:
                start_n = pid_n * BLOCK_N + (part + 2) * ROWS
                start_k = pid_k * BLOCK_K
            else:  # the next tile; after the last one its first rows are read again
                start_n = next_n * BLOCK_N
                start_k = next_k * BLOCK_K
            first = (start_n + row).to(gl.int64) * K + start_k
            w, m, v = _load_rows(w_ptr, m_ptr, v_ptr, first[:, None] + lane[None, :])
            gl.thread_barrier()
            g = gradient.index(part + 1).load(LAYOUT)
            mbarrier.arrive(free, count=1, pred=part == SLICES - 2)
            if norm_ptr is not None:
                norm_sq += gl.sum(gl.sum(g * g, 1), 0)
            update_elements(
                g, odd_w, odd_w, odd_m, odd_v, odd_w, odd_w,
                w_ptr, None, m_ptr, v_ptr, None, None, coefficient_ptr, numbers_ptr,
                odd[:, None] + lane[None, :], None, None, None,
                hash_seed(odd, rng_key)[:, None] + lanes[None, :], RULE, NESTEROV, STOCHASTIC, False,
            )  # fmt: skip
        if norm_ptr is not None:
            gl.store(norm_ptr + tile, norm_sq)
        pid_n = next_n
        pid_k = next_k


@gluon.constexpr_function
def _gradient_layout(rows, columns):
    """Where an fp32 tile lies in shared memory, free of bank conflicts for both sides.

    Tensor cores leave two neighbours with a thread, 8 in four threads and eight rows in a warp; the update
    reads 8 neighbours per thread. Bit by bit of the place: its columns, and rows or columns added to them.
    """
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32 + 4]]
    bases += [[0, 1 << bit] for bit in range(6, columns.bit_length() - 1)]
    bases += [[1, 8], [2, 16]]
    bases += [[1 << bit, 0] for bit in range(2, rows.bit_length() - 1)]
    return gl.SharedLinearLayout(bases)


@gluon.jit(do_not_specialize=["T", "rng_key"])
def wgrad_hopper_kernel(
    dy_desc, x_desc, w_desc, m_desc, v_desc, w_ptr, m_ptr, v_ptr, coefficient_ptr, numbers_ptr, norm_ptr,
    rng_key, T, N, K,
    RULE: gl.constexpr, NESTEROV: gl.constexpr, STOCHASTIC: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_T: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, VECTOR: gl.constexpr, UPDATE_WARPS: gl.constexpr, UPDATE_REGISTERS: gl.constexpr,
    GROUP: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The whole program: shared memory, barriers, and one branch per role."""
    MULTIPLY_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_K, 16])
    LANES: gl.constexpr = BLOCK_K // VECTOR if BLOCK_K // VECTOR < 32 else 32
    UPDATE_LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR], [32 // LANES, LANES], [UPDATE_WARPS, 1], [1, 0]
    )
    GRADIENT_LAYOUT: gl.constexpr = _gradient_layout(BLOCK_N, BLOCK_K)
    SLICE_LAYOUT: gl.constexpr = _gradient_layout(ROWS, BLOCK_K)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    tiles_n = N // BLOCK_N
    tiles_k = K // BLOCK_K
    dy_ring = gl.allocate_shared_memory(dy_desc.dtype, [STAGES, BLOCK_T, BLOCK_N], dy_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_T, BLOCK_K], x_desc.layout)
    gradient = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_K], GRADIENT_LAYOUT)
    slices = gradient._reinterpret(gl.float32, [BLOCK_N // ROWS, ROWS, BLOCK_K], SLICE_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    if SLOTS > 0:
        w_ring = gl.allocate_shared_memory(w_desc.dtype, [SLOTS, ROWS, BLOCK_K], w_desc.layout)
        m_ring = w_ring
        v_ring = w_ring
        if m_desc is not None:
            m_ring = gl.allocate_shared_memory(m_desc.dtype, [SLOTS, ROWS, BLOCK_K], m_desc.layout)
        if v_desc is not None:
            v_ring = gl.allocate_shared_memory(v_desc.dtype, [SLOTS, ROWS, BLOCK_K], v_desc.layout)
        asked = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
        for slot in gl.static_range(SLOTS):
            mbarrier.init(asked.index(slot), count=1)
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        dy_desc, x_desc, dy_ring, x_ring, ready, gradient, full, free, T, tiles_n, tiles_k,
                        BLOCK_N, BLOCK_K, BLOCK_T, GROUP, MULTIPLY_LAYOUT,
                    ),
                ),
                (
                    _update_tiles,
                    (
                        slices, full, free, w_desc, m_desc, v_desc, w_ring, m_ring, v_ring, asked,
                        w_ptr, m_ptr, v_ptr, coefficient_ptr, numbers_ptr, norm_ptr,
                        tiles_n, tiles_k, K, rng_key,
                        RULE, NESTEROV, STOCHASTIC, BLOCK_N, BLOCK_K, GROUP, UPDATE_LAYOUT,
                    ),
                ),
            ],
            [UPDATE_WARPS],
            [UPDATE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (
                        dy_desc, x_desc, dy_ring, x_ring, ready, gradient, full, free, T, tiles_n, tiles_k,
                        BLOCK_N, BLOCK_K, BLOCK_T, GROUP, MULTIPLY_LAYOUT,
                    ),
                ),
                (
                    _update_tiles_direct,
                    (
                        slices, full, free, w_ptr, m_ptr, v_ptr, coefficient_ptr, numbers_ptr, norm_ptr,
                        tiles_n, tiles_k, K, rng_key,
                        RULE, NESTEROV, STOCHASTIC, BLOCK_N, BLOCK_K, GROUP, UPDATE_LAYOUT,
                    ),
                ),
            ],
            [UPDATE_WARPS],
            [UPDATE_REGISTERS],
        )  # fmt: skip
