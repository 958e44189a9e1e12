"""CUDA graphs around the forward and the backward pass of a network.

Where batches are small, the GPU waits for the host, which launches thousands of kernels per step. A CUDA graph records
the kernels of a pass once; the host then launches all of them with one call. All addresses are recorded: each step
copies its images to the same memory, and its results appear in the same memory.

torch's own `torch.cuda.make_graphed_callables` is not used for two reasons. It must be called before DDP wraps the
network, so a running network could not change to graphs. And it returns the recorded gradients themselves, which
autograd may keep as `parameter.grad`: with gradient accumulation, the next micro-batch would overwrite them
(https://github.com/pytorch/pytorch/issues/181723).
"""

# B batch   C channels   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from facetrain.distributed import collectives
from facetrain.errors import ConfigError
from facetrain.telemetry.log import logger

_WARM_UP_PASSES = 3
"""Passes before the recording, in which cuDNN searches its algorithms and Triton compiles: neither can be recorded."""

Inputs = tuple[Tensor, ...]
"""Images (B, C, H, W), and the further inputs of the network."""
Tensors = tuple[Tensor | None, ...]


class GraphBackend(Protocol):
    """Recorder of the kernels that a function launches."""

    def warm_up(self, function: Callable[[], object]) -> None:
        """Call the function a few times, on the stream of the recording."""

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record a call of the function. Return what repeats its kernels, and the tensors that they write."""


class CudaBackend:
    """CUDA graphs of one network, which share their memory."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], object]) -> None:
        """Call the function a few times on a side stream: the default stream cannot be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_PASSES):
                function()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record the kernels without running them."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": threads that load images or write checkpoints may allocate memory in the meantime.
        recording = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with recording:
            results = function()
        return graph.replay, results


class GraphedNetwork(nn.Module):
    """Network whose training steps replay recorded graphs.

    The first training batch is recorded. Batches of another shape, evaluation and steps without gradients run the
    network itself. If the recording fails, all ranks run the network itself from then on.
    """

    def __init__(
        self, network: nn.Module, backend: Callable[[], GraphBackend], *, accumulates: bool, required: bool
    ) -> None:
        """Take the network, which must map images (B, C, H, W), and maybe further inputs, to embeddings (B, D).

        Args:
            network: network whose parameters and buffers stay at the same addresses.
            backend: makes the recorder of the graphs.
            accumulates: whether a step adds up the gradients of several backward passes.
            required: whether a recording that fails is an error.
        """
        super().__init__()
        self.network = network
        self._enabled = False
        self.failure = ""
        """Reason why the network could not be recorded on some rank; "" if there is none."""
        self._backend, self._accumulates, self._required = backend, accumulates, required
        self._graphs: _Graphs | None = None

    @property
    def enabled(self) -> bool:
        """Whether training steps use graphs. Otherwise none are kept: they hold the memory of all activations."""
        return self._enabled

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            self._graphs = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Map images (B, C, H, W), and the further inputs of the network, to embeddings (B, D).

        Raises:
            ConfigError: graphs are required, and the network cannot be recorded. All ranks raise it.
        """
        if not (self._enabled and self.network.training and torch.is_grad_enabled()):
            return self._run(*inputs)
        if self._graphs is None and not self.failure:
            self._record(inputs)
        if self._graphs is None or not self._graphs.fit(inputs):
            return self._run(*inputs)
        embedding_BD: Tensor = _Replay.apply(self._graphs, inputs, *self._graphs.parameters)
        return embedding_BD

    def _run(self, *inputs: Tensor) -> Tensor:
        embedding_BD: Tensor = self.network(*inputs)
        return embedding_BD

    def _record(self, inputs: Inputs) -> None:
        """Record the network. All ranks come here with the same step, and all succeed or none does."""
        graphs, reason = None, ""
        try:
            with _unchanged(self.network, inputs[0].device):
                graphs = _Graphs(self.network, inputs, self._backend(), accumulates=self._accumulates)
        except RuntimeError as error:  # of CUDA: no memory left, or an operation that cannot be recorded
            reason = " ".join(str(error).split())[:200] or type(error).__name__
        if not collectives.any_rank(bool(reason)):
            self._graphs = graphs
            return
        self.failure = reason or "another rank could not record them"
        if self._required:
            raise ConfigError(
                f"train.cuda_graphs: on is not possible: the backbone cannot be recorded ({self.failure}); "
                "set it to auto or off"
            )
        logger.warning("the backbone runs without CUDA graphs: it cannot be recorded (%s)", self.failure)


class _Graphs:
    """Recorded forward and backward pass for batches of one shape."""

    def __init__(
        self, network: nn.Module, inputs: Inputs, backend: GraphBackend, *, accumulates: bool
    ) -> None:
        self._inputs = tuple(tensor.detach().clone() for tensor in inputs)
        self._accumulates = accumulates
        self._forward_passes = 0
        self.parameters = tuple(p for p in network.parameters() if p.requires_grad)
        # Other leaves of the autograd graph on the same memory. Those of the parameters themselves belong to the
        # default stream since DDP has registered its hooks; a recording must not reach that stream.
        aliases = {
            name: parameter.detach().requires_grad_(parameter.requires_grad)
            for name, parameter in network.named_parameters()
        }
        trained = tuple(alias for alias in aliases.values() if alias.requires_grad)
        embeddings: list[Tensor] = []  # the newest one, with its autograd graph

        def forward() -> Tensors:
            embeddings[:] = [functional_call(network, aliases, self._inputs)]
            return (embeddings[0].detach(),)

        def backward() -> Tensors:
            return torch.autograd.grad(embeddings.pop(), trained, self._grad_BD, allow_unused=True)

        def both() -> None:
            (embedding_BD,) = forward()
            assert embedding_BD is not None
            self._grad_BD = torch.zeros_like(embedding_BD)
            backward()

        backend.warm_up(both)
        # In the order in which they are replayed: the backward pass reads what the forward pass has left.
        self._replay_forward, (embedding_BD,) = backend.record(forward)
        assert embedding_BD is not None
        self._embedding_BD = embedding_BD
        self._replay_backward, self._gradients = backend.record(backward)

    def fit(self, inputs: Inputs) -> bool:
        """Return whether the graphs were recorded for such a batch."""
        return list(map(_layout, inputs)) == list(map(_layout, self._inputs))

    def forward(self, inputs: Inputs) -> tuple[Tensor, int]:
        """Return the embeddings (B, D), and the number of this forward pass."""
        for recorded, tensor in zip(self._inputs, inputs, strict=True):
            recorded.copy_(tensor)
        self._replay_forward()
        self._forward_passes += 1
        # A copy, because the next step overwrites the original.
        return self._embedding_BD.clone(), self._forward_passes

    def backward(self, grad_BD: Tensor, forward_pass: int) -> Tensors:
        """Return the gradients of the parameters, from that of the embeddings of the newest forward pass."""
        if forward_pass != self._forward_passes:
            raise RuntimeError("a later forward pass has overwritten the activations of this one")
        self._grad_BD.copy_(grad_BD)
        self._replay_backward()
        # Autograd may keep what it gets as `parameter.grad`. Without accumulation, the optimizer has used it before the
        # next replay; with it, the next micro-batch is replayed before.
        return tuple(
            None if grad is None else grad.clone() if self._accumulates else grad.detach()
            for grad in self._gradients
        )


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return tensor.shape, tensor.dtype, tensor.stride()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, inputs: Inputs, *parameters: Tensor) -> Tensor:
        ctx.graphs = graphs
        embedding_BD, ctx.forward_pass = graphs.forward(inputs)
        return embedding_BD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphs.backward(grad_BD, ctx.forward_pass)


@contextmanager
def _unchanged(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the network's buffers and the random states on exit: the warm-up has changed both."""
    before = [buffer.clone() for buffer in network.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, value in zip(network.buffers(), before, strict=True):
            buffer.copy_(value)
