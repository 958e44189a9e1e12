"""World of a single process on the CPU, for tests that start no ranks."""

import torch

from facetrain.distributed.world import World

ONE_RANK = World(0, 0, 1, 1, torch.device("cpu"))
