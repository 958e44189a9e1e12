"""The head's Triton kernels compiled for GPUs without a GPU: what the assembler reports."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from facetrain.head.kernels import center_update as update
from facetrain.head.kernels import margin_softmax as softmax

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Compute capability -> shared memory of a block: A100; A40, RTX 30; L40, RTX 40; H100, H200; B200; RTX 50."""
Counts = dict[str, int]


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, *,
    default: str = "i32", aligned: Iterable[str] = (), **options: int,
) -> Counts:  # fmt: skip
    """Compile a kernel; return what its code uses.

    Args:
        kernel: the function.
        types: argument -> type; the others have the type `default`.
        constants: constant argument -> value; names that the kernel lacks are ignored.
        capability: compute capability of the GPU, such as 90.
        default: type of arguments that are not in `types`.
        aligned: numbers that are multiples of 16, as all pointers are.
        options: of the launch.
    """
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = {name: "constexpr" if name in constants else types.get(name, default) for name in names}
    multiples = [name for name in names if kinds[name].startswith("*") or name in aligned]
    source = ASTSource(
        kernel,
        kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in multiples},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    code = compiled.asm["ptx"]
    return machine_code(code, capability) | {
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4", code)),
        "wide_accesses": len(re.findall(r"(?:ld|st)\.global[.\w:]*\.v4", code)),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", code)),
        "tensor_core_instructions": len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", code)),
        "shared_bytes": compiled.metadata.shared,
        "shared_bytes_of_the_device": SHARED_BYTES[capability],
    }


def machine_code(ptx: str, capability: int) -> Counts:
    """Assemble PTX by the assembler that comes with Triton."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    newer = tools / "ptxas-blackwell"
    assembler = newer if capability >= 100 and newer.exists() else tools / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
        done = subprocess.run(
            [assembler, "-v", f"-arch={architecture}", source, "-o", Path(folder) / "kernel.cubin"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert spilled, done.stderr
    return {"registers": int(registers), "spilled_bytes": sum(map(int, spilled))}


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


def softmaxes(capabilities: Iterable[int]) -> dict[str, Counts]:
    """Compile with bfloat16 factors and the options with which the head launches the kernel on that device."""
    types = dict.fromkeys(("exponential", "embedding", "center"), "*bf16") | {"limit": "fp32"}
    types |= dict.fromkeys(("sums", "inverse_norm"), "*fp32") | {"position": "*i64"}
    both = "sums", "exponentials"
    return {
        f"{' and '.join(results)}{' with a filter' * filtered} for {capability}": compile_kernel(
            softmax._exponentials, types,
            {
                "D": 512, "filtered": filtered, "BG": 128, "BC": 256 if capability == 90 else 128, "BD": 64,
                "has_sums": "sums" in results, "has_exponentials": "exponentials" in results,
            },
            capability,
            aligned=("stride",), num_warps=softmax._WARPS, num_stages=softmax._STAGES,
        )
        for results, filtered in ((both[:1], False), (both[1:], False), (both, False), (both, True))
        for capability in capabilities
    }  # fmt: skip


def updates(capabilities: Iterable[int]) -> dict[str, Counts]:
    """Compile the centers' update for embeddings of 512 numbers."""
    constants = {
        "D": 512, "N": 1, "B": 4, "W": 128, "has_momentum": True, "has_index": False, "is_unfinished": True,
        "BR": update._TILE // 512, "BD": 512,
    }  # fmt: skip
    return {
        f"{name} for {capability}": compile_kernel(
            update._update, UPDATE_TYPES | {key: str(value) for key, value in options.items()},
            constants | {"has_index": "has_index" in options}, capability, num_warps=update._WARPS,
        )
        for name, options in UPDATES.items()
        for capability in capabilities
    }  # fmt: skip


KERNELS = {"softmax": softmaxes, "updates": updates}
