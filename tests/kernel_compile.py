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
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from forge_hf.kernels import elementwise, rules, tiles, wgrad_norm, wgrad_update  # noqa: E402
from forge_hf.scalars import StepScalars  # noqa: E402

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Triton 3.9 writes PTX for the newer of the two.
PTXAS = next((BIN / name for name in ("ptxas-blackwell", "ptxas") if (BIN / name).exists()), None)


def report(
    label: str, kernel: Any, arguments: dict[str, Any], num_warps: int = 4, num_stages: int = 3
) -> None:
    """Compile one kernel; `arguments` maps names to a pointer type ("*bf16"), a scalar type or a constant."""
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        is_type = isinstance(value, str) and (value[0] == "*" or value in ("i32", "fp32"))
        signature[name] = value if is_type else "constexpr"
        if not is_type:
            constants[(index,)] = value
        elif value != "fp32" and name not in ("T", "rng_key"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, **tiles.LAUNCH_OPTIONS},
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
    moments = () if moment is None else (f"*{TYPES[moment]}",) * (2 if rule == "adamw" else 1)
    arguments = rules.rule_arguments(
        rule, StepScalars(lr=1.0), "*fp32" if coefficient else None, 7 if stochastic else None, moments
    )
    arguments = {name: "fp32" if isinstance(value, float) else value for name, value in arguments.items()}
    return {**arguments, "w_ptr": f"*{TYPES[weight]}", "rng_key": "i32"}


def pair_arguments(operand: torch.dtype, even: bool) -> dict[str, Any]:
    """Arguments of the GEMM kernels for contiguous dy and x."""
    tile = tiles.gemm_tile(operand)
    types = dict.fromkeys(("T", "N", "K", "stride_dt", "stride_xt"), "i32")
    blocks = {
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "BLOCK_T": tile.block_t,
        "GROUP": tiles.GROUP_N,
    }
    pointers = {"dy_ptr": f"*{TYPES[operand]}", "x_ptr": f"*{TYPES[operand]}", "partial_ptr": "*fp32"}
    return {**types, **blocks, **pointers, "stride_dn": 1, "stride_xk": 1, "EVEN": even, "INTERPRET": False}


def main(everything: bool) -> None:
    """Compile the usual variants, or all of them."""
    f32, bf16 = torch.float32, torch.bfloat16
    cases = [("adamw", f32, bf16, bf16, True, True), ("adamw", bf16, f32, f32, False, False)]
    if everything:
        axes = itertools.product(
            ("adamw", "lion", "sgd"), TYPES, TYPES, (f32, bf16), (True, False), (True, False)
        )
        cases = [(rule, op, w, m, sr, even) for rule, op, w, m, sr, even in axes]
        cases += [("sgd", op, w, None, True, True) for op in TYPES for w in TYPES]
    for rule, operand, weight, moment, stochastic, even in cases:
        update = update_arguments(rule, weight, moment, stochastic, coefficient=even)
        label = f"{rule} {operand} w={weight} m={moment} stochastic={stochastic} even={even}".replace(
            "torch.", ""
        )
        tile = tiles.gemm_tile(operand)
        arguments = {**pair_arguments(operand, even), **update, "norm_ptr": "*fp32" if even else None}
        report(label, wgrad_update._wgrad_update_kernel, arguments, tile.num_warps, tile.num_stages)
        if operand == f32 or not everything:
            dense = {**update, "g_ptr": f"*{TYPES[operand]}", "count": "i32", "BLOCK": elementwise._BLOCK}
            report(label, elementwise._dense_update_kernel, dense)
    for operand in TYPES if everything else (bf16,):
        tile = tiles.gemm_tile(operand)
        for even in (True, False):
            report(
                f"{operand} {even}",
                wgrad_norm._gemm_norm_kernel,
                pair_arguments(operand, even),
                4,
                tile.num_stages,
            )
        for tokens in (1, 512, 2048) if everything else (512,):
            block_t, block_f = tiles.gram_tile(tokens, operand)
            arguments = {**pair_arguments(operand, False), "BLOCK_T": block_t, "BLOCK_F": block_f}
            report(f"{operand} {block_t}x{block_f}", wgrad_norm._gram_norm_kernel, arguments)


if __name__ == "__main__":
    main(everything="--all" in sys.argv)
