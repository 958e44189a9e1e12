"""Stand-in for CUDA graphs on a CPU: a recorded function is called again, and its results overwrite the first ones."""

import torch


class FunctionRecorder:
    """Recorder of functions, in place of `facetrain.training.cuda_graphs.CudaBackend`."""

    def __init__(self):
        self.replays = 0

    def warm_up(self, function):
        for _ in range(3):
            function()

    def record(self, function):
        results = function()

        def replay():
            self.replays += 1
            with torch.enable_grad():  # a graph does not know of autograd's modes
                again = function()
            for old, new in zip(results, again, strict=True):
                if old is not None:
                    old.detach().copy_(new)

        return replay, results


class BrokenRecorder:
    """Recorder of a network with an operation that cannot be recorded."""

    def warm_up(self, function):
        function()

    def record(self, function):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
