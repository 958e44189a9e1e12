"""Registry of export formats, by the name in `facetrain export --format`.

It imports no torch, so that the command line can list the formats at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facetrain.errors import ModelError, missing_package

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. A format supports those that its row in `FORMATS` names."""

    from_pixels: bool = False
    """Take uint8 RGB images (N, H, W, 3) and normalize them inside the network."""
    unit: bool = False
    """Divide the embeddings by their length."""
    int8: bool = False
    """Quantize weights and activations to 8 bits, with ranges of the activations that were measured on images."""
    split_prelu: bool = False
    """Write PReLU(x) as max(x, 0) + a·min(x, 0), which gives the same numbers."""
    opset: int | None = None
    """Version of ONNX's operators, for programs that read no newer one; None for the exporter's."""
    batch: int | None = None
    """Number of images that the file takes at a time; None for any number."""
    images: Any = None
    """Tensor of faces, uint8 (N, H, W, 3): file and network are compared on them, and `int8` is calibrated with most of
    them. None: a few random images, and for `int8` drawn faces."""


@dataclass(frozen=True)
class Similarity:
    """Cosines between the embeddings of a file and of the network."""

    mean: float
    lowest: float
    images: int


@dataclass(frozen=True)
class FileComparison:
    """Comparison of the embeddings of a file with the embeddings of the network."""

    difference: float
    """Largest difference of a number, as a share of the largest number in the network's embeddings."""
    cosine: Similarity


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    files: list[Path]
    """The file, and a second one that belongs to it."""
    comparison: FileComparison | None
    """Embeddings of the file beside the network's; None for a file that is not compared."""


@dataclass(frozen=True)
class Runtime:
    """A file, opened by the program that runs it."""

    name: str
    """Program and version, such as `onnxruntime 1.31.1`."""
    run: Callable[..., np.ndarray]
    """Maps images, as the file takes them, and landmarks (N, 5, 2) if the network takes them, to embeddings (N, D)."""


_GRAPH_OPTIONS = frozenset({"from_pixels", "unit", "batch"})


@dataclass(frozen=True)
class ExportFormat:
    """A row of the registry."""

    module: str
    """Module below `facetrain.models.export`, imported when the format is used. Its function `write(model, path,
    options)` writes a network to a file in a new folder, perhaps with a second file, and returns the file as a
    `Runtime`; None if no program runs it."""
    options: frozenset[str] = frozenset()
    """Fields of `ExportOptions` that the format supports."""
    packages: tuple[str, ...] = ()
    """Optional packages that the exporter imports; the extra of pyproject.toml with the name of the module installs
    them."""
    suffix: str = ""
    """End of the name of the file, by which the command line recognizes the format."""
    second_suffix: str = ""
    """Suffix of a second file, in place of the first one's; empty if there is none."""
    stores_weights: bool = False
    """Whether it stores the weights of a network of facetrain, and no graph whose embeddings could be compared."""

    def files(self, path: Path) -> list[Path]:
        """Return the files that an export to `path` writes."""
        return [path, path.with_suffix(self.second_suffix)] if self.second_suffix else [path]

    def load(self) -> Callable[..., Any]:
        """Import the module and its packages.

        Raises:
            ModelError: a package is not installed.
        """
        try:
            for package in self.packages:
                import_module(package)
        except ImportError as error:
            raise ModelError(f"this export format {missing_package(error, self.module)}") from error
        write: Callable[..., Any] = import_module(f"{__package__}.{self.module}").write
        return write


FORMATS: dict[str, ExportFormat] = {
    "safetensors": ExportFormat("safetensors", suffix=".safetensors", stores_weights=True),
    "onnx": ExportFormat(
        "onnx",
        _GRAPH_OPTIONS | {"int8", "opset", "split_prelu"},
        packages=("onnx", "onnxruntime", "onnxscript"),  # torch's exporter imports onnxscript
        suffix=".onnx",
    ),
    "torch_export": ExportFormat("torch_program", suffix=".pt2"),
    "openvino": ExportFormat(
        "openvino",
        _GRAPH_OPTIONS,
        packages=("onnx", "onnxscript", "openvino"),
        suffix=".xml",
        second_suffix=".bin",
    ),
}
"""All export formats."""
