"""Compiles every Triton program for a GPU that need not be there: `compile_programs.py 90` prints, as JSON, {program: its PTX, what ptxas says of it,
bytes of shared memory}. In a process of its own, because Triton is imported either to interpret or to compile."""
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

from horovod_compress.kernels.device import programs

FLOATS, WIDE = {"scale", "momentum", "before", "factor", "unit"}, {"numel", "count"}
INTEGERS = {"stride", "shift", "capacity", "key_low", "key_high", "limit", "largest"}
WHOLE = {"magnitudes", "indices", "floor", "counts", "peaks", "ends"}  # pointers to int32
NARROW = {"half", "codes"}  # pointers to int16
KINDS = [{"KIND": kind, "BASED": based} for kind in (programs.NONE, programs.VANILLA, programs.NESTEROV) for based in (False, True)]
VARIANTS = {  # of constants, where a program has more of them than BLOCK
    "sample": KINDS, "advance": KINDS, "average_momentum": [{"NESTEROV": False}, {"NESTEROV": True}],
    "quantize": [{"FRACTION": 26, "WIDTH": 5, "FIELDS": 6, "WORD": tl.int32}, {"FRACTION": 22, "WIDTH": 9, "FIELDS": 7, "WORD": tl.int64}],
    "dequantize": [{"OFFSETS": 15, "WIDTH": 5, "FIELDS": 6}, {"OFFSETS": -(2**60), "WIDTH": 9, "FIELDS": 7}],
}


def type_of(name):
    """As Triton writes the type of an argument. That numbers of elements are 64 bits wide serves any tensor."""
    if name in FLOATS | WIDE | INTEGERS:
        return "fp32" if name in FLOATS else "i64" if name in WIDE else "i32"
    return "*i32" if name in WHOLE else "*i16" if name in NARROW else "*fp32"


def compiled(program, constants, capability):
    signature = {name: "constexpr" if name in constants else type_of(name) for name in program.arg_names}
    if "words" in signature:
        signature["words"] = "*i64" if constants["FIELDS"] * constants["WIDTH"] > 32 else "*i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}  # as torch's memory is
    source = ASTSource(program, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})


def ptxas(ptx, capability):
    """What the assembler says: registers and spills of the program."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(capability).path, "-v", f"-arch={re.search(r'.target (sm_.*)', ptx)[1]}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main(capability):
    found = {}
    for name, program in vars(programs).items():
        if isinstance(program, triton.runtime.JITFunction) and not name.startswith("_"):
            for constants in VARIANTS.get(name, [{}]):
                kernel = compiled(program, {"BLOCK": programs.WORD_BLOCK if "quantize" in name else programs.BLOCK, **constants}, capability)
                ptx = kernel.asm["ptx"]
                found[" ".join([name, *map(str, constants.values())])] = ptx, ptxas(ptx, capability), kernel.metadata.shared
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
