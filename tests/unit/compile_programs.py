"""Compiles every Triton program for a GPU that need not be there: `compile_programs.py 90` prints,
as JSON, {program: its PTX, what ptxas says of it, bytes of shared memory}. In a process of its own,
because Triton is imported either to interpret or to compile."""

import json
import re
import subprocess
import sys
import tempfile

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from horovod_compress.kernels.device import launches
from horovod_compress.kernels.device.programs import (
    adaptive,
    dense,
    entries,
    lowrank,
    quantization,
    selection,
)

TYPES = {
    # Of the arrays that all tensors share; those of float32 are not named.
    "*i64": {"table", "owners", "ends"},
    "*i32": {"bins", "counts", "facts", "frames", "indices", "largest", "lines", "peaks"},
    "*i16": {"codes"},
    "*i8": {"marks", "scales"},
    "*fp64": {"dots", "sums", "turns"},
}
KINDS = [
    {"KIND": kind, "BASED": based}
    for kind in (selection.NONE, selection.VANILLA, selection.NESTEROV)
    for based in (False, True)
]
ONE_OR_TWO = [{"TWO": False}, {"TWO": True}]
SEARCHED = {"BLOCK": launches.SEARCHED, "TILE": launches.BLOCK // selection.LINE}
COLLECTED = {**SEARCHED, "TILE": SEARCHED["TILE"] // 2}
VARIANTS = {
    # Of constants, where a program has more of them than COLUMNS and BLOCK.
    "advance": KINDS,
    "narrow": [{**SEARCHED, "STAGE": stage} for stage in (1, 2, 3)],
    "count": [SEARCHED],
    "collect": [
        {**COLLECTED, **each, "TAKEN": taken} for each in ONE_OR_TWO for taken in (False, True)
    ],
    "add_frames": [{"BLOCK": launches.SEARCHED}],
    **dict.fromkeys(["multiply", "project", "subtract"], [{"CHUNK": 4, "BLOCK": 1}]),
    "project_back": [{"CHUNK": 4, "VECTORS": 4, "BLOCK": 1}],
    "turn": [
        {
            "TURNS": turns,
            "COUNTS": counts,
            "RANK": rank,
            "TILE": 512 // rank,
            "BLOCK": lowrank.TURNED,
        }
        for turns, counts in ((False, True), (True, True), (True, False))
        for rank in (4, 8)
    ],
    "find_turns": [{"RANK": 4, "BLOCK": 1}, {"RANK": 8, "BLOCK": 1}],
    "put": ONE_OR_TWO,
    "collect_marked": ONE_OR_TWO,
    "average_momentum": [{"NESTEROV": False}, {"NESTEROV": True}],
    "accumulate_variance": [{"GIVEN": False}, {"GIVEN": True}],
    "accumulate_bins": [{"WIDTH": 64, "BLOCK": 8}, {"WIDTH": 512, "BLOCK": 1}],
    "quantize": [
        {"FRACTION": 26, "WIDTH": 5, "FIELDS": 6, "WORD": tl.int32, "SCALES": 1},
        {
            **{"FRACTION": 22, "WIDTH": 9, "FIELDS": 7, "WORD": tl.int64, "SCALES": 2},
            "BLOCK": launches.WORD_BLOCK // 2,
        },
    ],
    "dequantize": [
        {"OFFSETS": 15, "WIDTH": 5, "FIELDS": 6, "SCALES": 1},
        {"OFFSETS": -(2**60), "WIDTH": 9, "FIELDS": 7, "SCALES": 2},
    ],
    "count_fits": [
        {"WIDTH": 2, "FIELDS": 15, "WORD": tl.int32, "FRACTION": 28},
        {"WIDTH": 5, "FIELDS": 12, "WORD": tl.int64, "FRACTION": 22},
    ],
    "find_scales": [{"WIDTH": 2, "FIELDS": 15}, {"WIDTH": 5, "FIELDS": 12}],
}


def type_of(name, constants):
    """As Triton writes the type of an argument."""
    if name == "words":
        return "*i64" if constants["FIELDS"] * constants["WIDTH"] > 32 else "*i32"
    return next((kind for kind, names in TYPES.items() if name in names), "*fp32")


def compiled(program, constants, capability):
    signature = {
        name: "constexpr" if name in constants else type_of(name, constants)
        for name in program.arg_names
    }
    # As torch's memory is.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(program, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}
    )


def ptxas(ptx, capability):
    """What the assembler says: registers and spills of the program."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            get_ptxas(capability).path,
            "-v",
            f"-arch={re.search(r'.target (sm_.*)', ptx)[1]}",
            file.name,
            "-o",
            "/dev/null",
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def programs():
    """{name: program} of all files, without the functions that programs are made of."""
    return {
        name: each
        for module in (adaptive, dense, entries, lowrank, quantization, selection)
        for name, each in vars(module).items()
        if isinstance(each, triton.runtime.JITFunction)
        and each.fn.__module__ == module.__name__
        and not name.startswith("_")
    }


def main(capability):
    found = {}
    for name, program in programs().items():
        for constants in VARIANTS.get(name, [{}]):
            block = (
                launches.WORD_BLOCK
                if "FIELDS" in constants
                else launches.MARK_BLOCK
                if "marks" in program.arg_names
                else launches.BLOCK
            )
            kernel = compiled(program, {"COLUMNS": 9, "BLOCK": block, **constants}, capability)
            ptx = kernel.asm["ptx"]
            found[" ".join([name, *map(str, constants.values())])] = (
                ptx,
                ptxas(ptx, capability),
                kernel.metadata.shared,
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
