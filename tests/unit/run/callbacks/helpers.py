"""Sizes of the test network, and a sink for its metrics."""

import torch

CPU = torch.device("cpu")
BATCH, CLASSES, SIZE = 6, 4, 16


class Board:
    """Sink that keeps what is written."""

    def __init__(self):
        self.written = []

    def write(self, step, values):
        self.written.append((step, values))


class Lines:
    """Console that keeps its lines."""

    def __init__(self):
        self.lines = []

    def write(self, step, values):
        pass

    def print(self, line):
        self.lines.append(line)

    def advance(self, step, activity=""):
        self.progress = step, activity
