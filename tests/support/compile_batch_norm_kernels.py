"""Compile the batch norm kernels for GPUs that need not be there, and print what the assembler reports."""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from facetrain.backbone.kernels import gradient, launch, normalize, statistics

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Compute capability -> shared memory of a block: A100; A40, RTX 30; L40, RTX 40; H100, H200; B200; RTX 50."""
ACTIVATIONS = ("x", "y", "normed", "grad", "grad_x", "residual", "by_normed")
SCALARS = {"eps": "fp32", "momentum": "fp32", "share": "fp32"} | dict.fromkeys(
    ("N", "C", "tiles", "P", "H", "W", "outputs"), "i32"
)
CASES = {
    "statistics": (statistics._statistics, {}),
    "batch norm, and its normalized input": (normalize._normalize, {"has_normed": True}),
    "batch norm, PReLU, statistics": (normalize._normalize, {"has_slope": True, "has_statistics": True}),
    "batch norm, shortcut, statistics": (
        normalize._normalize,
        {"has_residual": True, "has_residual_norm": True, "has_statistics": True},
    ),
    "reduce gradient, recompute": (gradient._reduce_gradient, {"has_slope": True, "has_result": True}),
    "apply gradient": (
        gradient._apply_gradient,
        {"has_slope": True, "has_residual": True, "has_sums": True},
    ),
    "finish the weight's gradient": (gradient._finish_weight_gradient, {}),
    "border sums": (gradient._border_sums, {}),
    "finish statistics": (statistics._finish_statistics, {"has_running": True}),
}
_FLAGS = (
    "has_slope", "has_residual", "has_residual_norm", "has_statistics", "has_normed", "has_result", "has_sums",
    "has_running", "is_normed",
)  # fmt: skip


def compile_for(kernel, flags: dict[str, bool], capability: int, *, one_tile: bool = False) -> dict[str, int]:
    """Compile a kernel for bfloat16 activations, as it is launched for an IResNet's channels.

    Triton compiles another variant where an argument is 1: `one_tile` is the one of few rows.
    """
    names = kernel.arg_names
    rows, channels = launch.BLOCK_ROWS, launch.BLOCK_CHANNELS
    constants = (
        {"BN": rows, "BC": channels, "STAGES": launch.STAGES}
        | ({"tiles": 1} if one_tile else {})
        | dict.fromkeys(_FLAGS, False)
        | flags
    )
    constants = {name: value for name, value in constants.items() if name in names}
    types = {
        name: "constexpr"
        if name in constants
        else "*bf16"
        if name in ACTIVATIONS or (name == "weight" and "by_normed" in names)
        else SCALARS.get(name, "*fp32")
        for name in names
    }
    aligned = [name for name in names if types[name].startswith("*") or name == "C"]
    source = ASTSource(
        kernel,
        types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": launch.WARPS})
    code = compiled.asm["ptx"]
    return machine_code(code, capability) | {
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4", code)),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", code)),
        "shared_bytes": compiled.metadata.shared,
        "shared_bytes_of_the_device": SHARED_BYTES[capability],
    }


def machine_code(ptx: str, capability: int) -> dict[str, int]:
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
            capture_output=True,
            text=True,
            check=True,
        )
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert spilled, done.stderr
    return {"registers": int(registers), "spilled_bytes": sum(map(int, spilled))}


def main() -> None:
    print(
        json.dumps(
            {
                f"{name} for sm_{capability}": compile_for(kernel, flags, capability)
                for name, (kernel, flags) in CASES.items()
                for capability in SHARED_BYTES
            }
            | {
                f"{name}, one tile, for sm_90": compile_for(kernel, flags, 90, one_tile=True)
                for name, (kernel, flags) in CASES.items()
                if "tiles" in kernel.arg_names
            }
        )
    )


if __name__ == "__main__":
    main()
