"""Options of drawn faces. This module imports nothing heavy: the command line reads it for every command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SyntheticFaces:
    """Numbers and size of drawn faces. The defaults are the faces of `configs/quickstart.yaml`, but larger."""

    identities: int = 1000
    """Number of identities to train on."""
    images_per_identity: int = 12
    """Number of images of each of them."""
    eval_identities: int = 100
    """Number of other identities, for the verification set."""
    eval_pairs: int = 1000
    """Number of pairs in the verification set, half of them of one identity; a multiple of 20."""
    image_size: int = 112
    """Width and height in pixels."""
    seed: int = 0
    """Seed of the identities and their images; another seed gives other identities."""
