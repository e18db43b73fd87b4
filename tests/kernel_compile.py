"""Compile the kernels for an H100/H200 (sm_90) on a machine without a GPU: `python tests/kernel_compile.py`.

The interpreter accepts code that the compiler refuses (types, shapes, shared memory). Run as a script because
TRITON_INTERPRET must be unset before triton is imported, which is not so inside the test process. Prints one
line per kernel: name, variant, shared memory in bytes; registers and spilled bytes where ptxas is at hand.
`--all` compiles every combination of rule, dtypes and flags (minutes).
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter does not compile"

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from forge_hf.kernels import (  # noqa: E402
    elementwise,
    embedding,
    grouped_norm,
    norm_plan,
    plan,
    rules,
    tiles,
    wgrad_gram,
    wgrad_norm,
    wgrad_update,
)

LANGUAGE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Their kernels say `do_not_specialize`.
GRAM_COUNTS = ("blocks_n", "blocks_all", "parts_n", "parts")
UNSPECIALIZED = ("T", "rng_key", "first_block", "count", "first", *GRAM_COUNTS)
# Triton 3.9 writes PTX for the newer of the two.
PTXAS = next((BIN / name for name in ("ptxas-blackwell", "ptxas") if (BIN / name).exists()), None)


ROW_SUMS = {"head_ptr": "*i32", "sums_ptr": "*fp32"}
TABLE = {"table_ptr": "*i64", "buffer_ptr": "*fp32", "first": "i32"}


def report(label: str, kernel: Any, arguments: dict[str, Any], tile: plan.Tile = plan.GENERIC) -> None:
    """Compile one kernel; `arguments` maps names to a pointer type ("*bf16"), a scalar type or a constant."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        is_type = isinstance(value, str) and (value[0] == "*" or value in ("i32", "fp32"))
        signature[name] = value if is_type else "constexpr"
        if not is_type:
            constants[(index,)] = value
        elif value != "fp32" and name not in UNSPECIALIZED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "maxnreg": tile.max_registers,
            **tiles.LAUNCH_OPTIONS,
        },
    )
    shared = compiled.metadata.shared
    assert shared <= 227 * 1024, f"{label}: {shared} bytes of shared memory"
    print(f"{kernel.__name__} {label}: shared {shared}{_registers(compiled.asm['ptx'])}", flush=True)


def _registers(ptx: str) -> str:
    if PTXAS is None:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(PTXAS), "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores", text)
    return f", registers {registers and registers[1]}, spilled {spills and spills[1]}"


def update_arguments(
    rule: str, weight: torch.dtype, moment: torch.dtype | None, stochastic: bool, coefficient: bool
) -> dict[str, Any]:
    """What `rules.rule_arguments` passes, with types for run-time values."""
    arguments: dict[str, Any] = dict.fromkeys(rules.POINTERS)
    names = ("m_ptr", "v_ptr") if rule == "adamw" else ("m_ptr",)
    for name in names if moment is not None else ():
        arguments[name] = f"*{TYPES.get(moment, 'u8' if name == 'v_ptr' else 'i8')}"
        if moment == torch.int8:
            arguments[name.replace("_ptr", "_scale_ptr")] = "*u8"
    constants = dict(zip(rules.CONSTANTS, (rule, False, stochastic), strict=True))
    arguments |= {"coefficient_ptr": "*fp32" if coefficient else None, "numbers_ptr": "*fp32"}
    return {**arguments, **constants, "w_ptr": f"*{TYPES[weight]}", "rng_key": "i32", "INTERPRET": False}


def elements(rule: str, weight: torch.dtype, moment: torch.dtype | None) -> dict[str, Any]:
    """Dtypes behind the addresses of a group's table."""
    second = moment if rule == "adamw" else None
    scale = tl.uint8 if moment == torch.int8 else None
    return {
        "WEIGHT": LANGUAGE[weight],
        "LOW": None,
        "M": moment and LANGUAGE[moment],
        "V": second and (tl.uint8 if second == torch.int8 else LANGUAGE[second]),
        "M_SCALE": scale,
        "V_SCALE": scale if second else None,
    }


def pair_arguments(operand: torch.dtype, even: bool, tile: plan.Tile) -> dict[str, Any]:
    """Arguments of the GEMM kernels for contiguous dy and x."""
    types = dict.fromkeys(("T", "N", "K", "stride_dt", "stride_xt"), "i32")
    blocks = {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_T": tile.block_t,
        "PARTS": tile.parts,
        "GROUP": tiles.GROUP_N,
    }
    pointers = {"dy_ptr": f"*{TYPES[operand]}", "x_ptr": f"*{TYPES[operand]}", "partial_ptr": "*fp32"}
    flags = {"stride_dn": 1, "stride_xk": 1, "EVEN": even, "EVEN_T": even, "INTERPRET": False}
    flags |= {"head_ptr": None, "sums_ptr": None}
    return {**types, **blocks, **pointers, **flags}


def update_tiles(operand: torch.dtype, weight: torch.dtype, moment: torch.dtype | None) -> list[plan.Tile]:
    """The tiles that `plan.update_tile` may choose for these dtypes."""
    if operand == torch.float32:
        return [plan.FP32._replace(parts=2) if moment == torch.int8 else plan.FP32]
    narrow = weight.itemsize == 2 and (moment is None or moment.itemsize <= 2)
    return [plan.GENERIC, *((plan.HOPPER_PAIR, plan.HOPPER_WIDE) if narrow else (plan.HOPPER_WIDE_FP32,))]


def report_embedding(operand: torch.dtype) -> None:
    """Compile the kernels of embeddings, but for the update."""
    types = dict.fromkeys(("T", "N", "K", "stride_t", "stride_target"), "i32")
    pointers = {"ids_ptr": "*i32", "order_ptr": "*i64", "dy_ptr": f"*{TYPES[operand]}", "norm_ptr": "*fp32"}
    blocks = {"PIECE": embedding.PIECE, "ROWS": embedding.ROWS, "COLUMNS": embedding.COLUMNS, "stride_k": 1}
    arguments = {**types, **pointers, **ROW_SUMS, **blocks, "INTERPRET": False}
    arguments["target_ptr"] = f"*{TYPES[operand]}"
    for kernel in (embedding._piece_kernel, embedding._join_kernel, embedding._add_rows_kernel):
        report(f"{operand}", kernel, arguments)


def report_gram(operand: torch.dtype, tokens: int) -> None:
    """Compile the four kernels of the Gram form for a weight of 14336x4096, and those for many weights."""
    gram = norm_plan.gram_plan(tokens, 14336, 4096, operand)
    tile = plan.GENERIC._replace(num_warps=gram.num_warps, num_stages=gram.num_stages)
    ints = dict.fromkeys((*GRAM_COUNTS, "count", "features", "columns_at", "tiles_at", "centred_at"), "i32")
    pointers = {"scratch_ptr": "*fp32", "out_ptr": "*fp32"}
    reads = {"ROWS": norm_plan.SLICE_ROWS, "PART_BLOCK": wgrad_gram.PART_BLOCK}
    sides = {"COLUMN_BLOCKS": wgrad_gram.COLUMN_BLOCKS, "BLOCK": wgrad_norm.FINISH_BLOCK}
    blocks = {
        "UNIT": True,
        "EVEN": gram.even,
        "BLOCK_T": gram.block_t,
        "BLOCK_F": gram.block_f,
        **reads,
        **sides,
    }
    table = {**TABLE, "ELEMENT": grouped_norm.ELEMENTS[operand], "PARTS": gram.parts_n + gram.parts_k}
    arguments = {**pair_arguments(operand, False, plan.GENERIC), **ints, **pointers, **blocks, **table}
    columns = {
        **arguments,
        "BLOCK_T": gram.column_rows,
        "BLOCK_F": gram.column_width,
        "ONE": gram.column_rows >= tokens,
    }
    label = f"{operand} T={tokens}"
    for kernel in (wgrad_gram._gram_columns_kernel, grouped_norm._grams_columns_kernel):
        report(label, kernel, columns, plan.GENERIC._replace(num_warps=8))
    for kernel in (wgrad_gram._gram_parts_kernel, grouped_norm._grams_parts_kernel):
        report(label, kernel, arguments, tile)
    for kernel in (wgrad_gram._gram_product_kernel, grouped_norm._grams_product_kernel):
        report(label, kernel, arguments)
    report(label, wgrad_norm._finish_kernel, arguments)
    report(label, grouped_norm._finish_all_kernel, arguments)


def main(everything: bool) -> None:
    """Compile the usual variants, or all of them."""
    f32, bf16 = torch.float32, torch.bfloat16
    cases = [
        ("adamw", f32, bf16, bf16, True, True),
        ("adamw", bf16, f32, f32, False, False),
        ("adamw", bf16, bf16, bf16, True, True),
        ("adamw", bf16, bf16, torch.int8, True, True),
        ("adamw", bf16, f32, torch.int8, True, False),
        ("sgd", f32, bf16, None, True, True),
    ]
    if everything:
        axes = itertools.product(
            ("adamw", "lion", "sgd"), TYPES, TYPES, (f32, bf16, torch.int8), (True, False), (True, False)
        )
        cases = [(rule, op, w, m, sr, even) for rule, op, w, m, sr, even in axes]
        cases += [("sgd", op, w, None, True, True) for op in TYPES for w in TYPES]
    for rule, operand, weight, moment, stochastic, even in cases:
        update = update_arguments(rule, weight, moment, stochastic, coefficient=even)
        flags = f"stochastic={stochastic} even={even}"
        label = f"{rule} {operand} w={weight} m={moment} {flags}".replace("torch.", "")
        norm = {"norm_ptr": "*fp32" if even else None}
        for tile in update_tiles(operand, weight, moment):
            arguments = {**pair_arguments(operand, even, tile), **update, **norm}
            for tied in ("", " tied") if everything or weight == moment else ("",):
                arguments |= ROW_SUMS if tied else {}
                report(
                    f"{label} {tile.block_n}x{tile.block_k}{tied}",
                    wgrad_update._wgrad_update_kernel,
                    arguments,
                    tile,
                )
            arguments = {name: value for name, value in arguments.items() if name not in ROW_SUMS}
            group = {"table_ptr": "*i64", "PAIR": LANGUAGE[operand], **elements(rule, weight, moment)}
            group["COLUMNS"] = wgrad_update.GROUP_COLUMNS
            arguments |= group
            names = wgrad_update._grouped_update_kernel.arg_names
            report(
                f"{label} {tile.block_n}x{tile.block_k} group",
                wgrad_update._grouped_update_kernel,
                {name: arguments[name] for name in names},
                tile,
            )
        if operand == f32 or not everything:
            blocks = {"columns": "i32", "first_block": "i32", "EVEN": even, "BLOCK": elementwise.BLOCK}
            dense = {**update, **norm, **blocks, "g_ptr": f"*{TYPES[operand]}"}
            report(label, elementwise._dense_update_kernel, dense)
            group = {"table_ptr": "*i64", "owner_ptr": "*i32", "GRADIENT": LANGUAGE[operand], "WIDE": even}
            group |= {"COLUMNS": elementwise.DENSE_COLUMNS, **elements(rule, weight, moment)}
            names = elementwise._grouped_dense_kernel.arg_names
            grouped = {name: {**dense, **group}[name] for name in names}
            report(f"{label} group", elementwise._grouped_dense_kernel, grouped)
            table = {**update, **ROW_SUMS, "N": "i32", "K": "i32", "EVEN": even, "ROWS": 4, "COLUMNS": 256}
            report(label, embedding._table_update_kernel, table)
    for operand in TYPES if everything else (bf16,):
        for tile in (plan.FP32,) if operand == f32 else (plan.GENERIC, norm_plan.HOPPER_NORM):
            for even in (True, False):
                table = {**TABLE, "ELEMENT": grouped_norm.ELEMENTS[operand]}
                arguments = {**pair_arguments(operand, even, tile), **table}
                for kernel in (wgrad_norm._gemm_norm_kernel, grouped_norm._gemms_kernel):
                    report(f"{operand} {even} {tile.block_n}x{tile.block_k}", kernel, arguments, tile)
                report(
                    f"{operand} {even} tied", wgrad_norm._gemm_norm_kernel, {**arguments, **ROW_SUMS}, tile
                )
        report_embedding(operand)
        for tokens in (1, 512, 2048) if everything else (512,):
            report_gram(operand, tokens)


if __name__ == "__main__":
    main(everything="--all" in sys.argv)
