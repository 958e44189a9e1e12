"""What a fine-tuning is asked for, and the files in its output folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from facetrain.progress import ProgressCallback

Bar = Callable[[str], AbstractContextManager[ProgressCallback]]
"""Opens a progress bar with a title."""


@dataclass(frozen=True)
class Request:
    """Request of the user."""

    photos: Path
    """Dataset of photos or of aligned faces."""
    model: Path
    """Any model that `model.init_from` takes."""
    output: Path
    """Folder of the fine-tuning."""
    address: str | None = None
    """Address from which `model` was downloaded, for the config."""
    aligner: Path | None = None
    """File of the detector or of the landmarks by which photos are aligned."""
    targets: tuple[str, ...] = ()
    """Verification sets of other people."""
    overrides: tuple[str, ...] = ()
    """Config values, KEY=VALUE, which win over the choices."""
    resume: bool = False
    """Whether the output may have the parts that an interrupted command has finished."""
    seed: int = 0
    """Seed of the images that are held out and of the people who are set aside."""


class Workplace:
    """Files of a fine-tuning in its output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faces = folder / "faces"
        """Aligned faces, a dataset, of which `train`, `held_out` and `set_aside` are the parts, see `held_out.py`."""
        self.train, self.held_out, self.set_aside = (
            folder / "data" / name for name in ("train", "held_out", "set_aside")
        )
        self.pairs, self.set_aside_pairs = folder / "held_out.bin", folder / "set_aside.bin"
        """Verification sets of the held-out faces, and of the people set aside."""
        self.first = folder / "first.safetensors"
        """Trainable copy of a first model that is an ONNX or MXNet file."""
        self.embeddings = folder / "embeddings.safetensors"
        """Embeddings of the training images by the first model, which is the teacher."""
        self.run = folder / "run"
        self.candidate = folder / "candidate.safetensors"
        """Model that is judged, until the verdict."""
        self.model = folder / "model.safetensors"
        """The better model."""
        self.page = folder / "report.html"
