"""Compiles the Triton kernels for A100, H100 and H200 without a GPU, and prints what the machine code uses."""

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from facetrain.head.kernels import margin_softmax as softmax

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Compute capability -> shared memory of a thread block: A100, then H100 and H200."""
TYPES = {
    "splits": "*fp32",
    "log_total": "*fp32",
    "inverse_norm": "*fp32",
    "target": "*i64",
    "scale": "fp32",
    "limit": "fp32",
}
FACTORS = ("slope", "embedding", "center")


def compile_for(kernel, capability: int, columns: int) -> dict[str, int]:
    """Compile a kernel with bfloat16 factors and the options with which the head launches it on that device."""
    constants = {"filtered": True, "BG": 128, "BC": columns, "BD": 64}
    names = kernel.arg_names
    types = {
        name: "constexpr" if name in constants else "*bf16" if name in FACTORS else TYPES.get(name, "i32")
        for name in names
    }
    aligned = [name for name in names if types[name].startswith("*") or name in ("G", "C", "D")]
    source = ASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": softmax._WARPS, "num_stages": softmax._STAGES}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = compiled.asm["ptx"]
    return {
        "tensor_core_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync", code)),
        "local_memory": len(re.findall(r"\.local\b", code)),
        "shared_bytes": compiled.metadata.shared,
        "shared_bytes_of_the_device": SHARED_BYTES[capability],
    }


def main() -> None:
    print(
        json.dumps(
            {
                f"{kernel.__name__} for {capability}": compile_for(kernel, capability, columns)
                for kernel in (softmax._statistics, softmax._slopes)
                for capability, columns in ((80, 128), (90, 256))
            }
        )
    )


if __name__ == "__main__":
    main()
