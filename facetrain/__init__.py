"""facetrain: an end-to-end face-recognition trainer.

The names of `__all__` are the Python interface, which `facetrain.api` documents. They are imported when they are first
used: `import facetrain` takes no time and does not import torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from facetrain import errors as errors
    from facetrain.api import Comparison as Comparison
    from facetrain.api import Dataset as Dataset
    from facetrain.api import EmbeddingMap as EmbeddingMap
    from facetrain.api import Model as Model
    from facetrain.api import Run as Run
    from facetrain.api import evaluate as evaluate
    from facetrain.api import load_map as load_map
    from facetrain.api import load_model as load_model
    from facetrain.api import resume as resume
    from facetrain.api import train as train
    from facetrain.head.partial_fc import PartialFC as PartialFC

__version__ = "0.1.0"
__all__ = [
    "Comparison",
    "Dataset",
    "EmbeddingMap",
    "Model",
    "PartialFC",
    "Run",
    "__version__",
    "errors",
    "evaluate",
    "load_map",
    "load_model",
    "resume",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'facetrain' has no attribute {name!r}")
    if name == "errors":
        return import_module("facetrain.errors")
    if name == "PartialFC":
        return import_module("facetrain.head.partial_fc").PartialFC
    if "torch" not in sys.modules:  # facetrain loads it, and not the program: then as for the command line
        import_module("facetrain.distributed.process_setup").bound_spinning()
    return getattr(import_module("facetrain.api"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
