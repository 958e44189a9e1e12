"""Modules that most commands and ranks use. A process that is forked from one with them starts in no time.

Importing them takes six seconds; optimizers import torch._dynamo, DistributedDataParallel the hooks, an evaluation
scipy.special, and a run with the usual settings TensorBoard and matplotlib.
"""

import gc
import os

# As a new process of facetrain has it: torch's C++ side reads its log level when it is loaded.
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

import matplotlib.backends.backend_agg
import matplotlib.backends.backend_svg
import matplotlib.figure  # noqa: F401
import scipy.special  # noqa: F401
import torch._dynamo
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks
import torch.utils.tensorboard  # noqa: F401

import facetrain.cli.app
import facetrain.distributed.elastic_agent
import facetrain.run.train
import facetrain.verify.evaluate  # noqa: F401

gc.freeze()  # the collector of a forked process would write to all pages, and so copy them
