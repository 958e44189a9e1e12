"""Compiles the head's Triton kernels for A100, H100, H200 and B200 without a GPU, and prints what the code uses.

The argument is `softmax` or `updates`: two processes of pytest compile one part each.
"""

import json
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from facetrain.head.kernels import center_update as update
from facetrain.head.kernels import margin_softmax as softmax
from tests.support.compile_batch_norm_kernels import SHARED_BYTES, machine_code

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
    return machine_code(code, capability) | {
        "tensor_core_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", code)),
        "shared_bytes": compiled.metadata.shared,
        "shared_bytes_of_the_device": SHARED_BYTES[capability],
    }


UPDATE_TYPES = dict.fromkeys(("lr", "momentum_factor", "weight_decay"), "fp32") | {
    "scale": "*fp32", "index": "*i64", "target_gradient": "*fp32", "sample": "*i64", "first": "*i32", "valid": "*u8",
}  # fmt: skip
UPDATES = {
    "float32": {"weight": "*fp32", "momentum": "*fp32", "gradient": "*i16"},
    "bfloat16": {"weight": "*i16", "momentum": "*i16", "gradient": "*i16"},
    "bfloat16, sampled": {"weight": "*i16", "momentum": "*i16", "gradient": "*i16", "has_index": True},
    "bfloat16 and int8": {"weight": "*i16", "momentum": "*i8", "gradient": "*i16"},
}
"""Storage of the centers' update; bfloat16 is passed as int16."""


def compile_update(options: dict[str, Any], capability: int) -> dict[str, int]:
    """Compile the centers' update for embeddings of 512 numbers."""
    kernel, size = update._update, 512
    constants = {
        "D": size, "N": 1, "B": 4, "W": 128, "has_momentum": True, "has_index": False, "is_unfinished": True,
        "BR": update._TILE // size, "BD": size,
    }  # fmt: skip
    constants |= {name: value for name, value in options.items() if name in constants}
    names = kernel.arg_names
    types = {
        name: "constexpr" if name in constants else (UPDATE_TYPES | options).get(name, "i32")
        for name in names
    }
    source = ASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in names if types[n].startswith("*")},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": update._WARPS}
    )
    code = compiled.asm["ptx"]
    return machine_code(code, capability) | {
        "wide_accesses": len(re.findall(r"(?:ld|st)\.global[.\w:]*\.v4", code)),
        "shared_bytes": compiled.metadata.shared,
    }


def compile_softmaxes() -> dict[str, dict[str, int]]:
    return {
        f"{kernel.__name__} for {capability}": compile_for(
            kernel, capability, 256 if capability == 90 else 128
        )
        for kernel in (softmax._statistics, softmax._slopes)
        for capability in SHARED_BYTES
    }


def compile_updates() -> dict[str, dict[str, int]]:
    return {
        f"{name} for {capability}": compile_update(options, capability)
        for name, options in UPDATES.items()
        for capability in SHARED_BYTES
    }


if __name__ == "__main__":
    print(json.dumps({"softmax": compile_softmaxes, "updates": compile_updates}[sys.argv[1]]()))
