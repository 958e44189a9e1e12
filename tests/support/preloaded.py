"""Modules that most commands and ranks use. A process that is forked from one with them starts in no time.

Importing them takes four seconds; optimizers import torch._dynamo, and DistributedDataParallel the hooks.
"""

import gc

import torch._dynamo
import torch.distributed.algorithms.ddp_comm_hooks.default_hooks  # noqa: F401

import facetrain.cli.app
import facetrain.distributed.elastic_agent
import facetrain.run.train
import facetrain.verify.evaluate  # noqa: F401

gc.freeze()  # the collector of a forked process would write to all pages, and so copy them
