"""Sizes of the test network, and a sink for its metrics."""

import torch

from facetrain.telemetry.recorder import Sink

CPU = torch.device("cpu")
BATCH, CLASSES, SIZE = 6, 4, 16


class Board(Sink):
    """Sink that keeps what is written and shown; showing images fails if it is broken."""

    shows_images = True

    def __init__(self, *, broken=False):
        self.written, self.shown, self._broken = [], [], broken

    def write(self, step, values):
        self.written.append((step, values))

    def show(self, step, images):
        if self._broken:
            raise RuntimeError("no space left for images")
        self.shown.append((step, set(images)))


class Lines:
    """Console that keeps its lines."""

    def __init__(self):
        self.lines = []

    def print(self, line):
        self.lines.append(line)

    def advance(self, step, activity=""):
        self.progress = step, activity
