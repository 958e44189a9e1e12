"""Fake GPU: stands for the device of a rank, so that `train` itself runs with every default of a GPU on any machine.

A tensor on the fake GPU keeps its content in host memory, where its operations are computed at once. So a run has real
losses, checkpoints and verifications. The fake refuses and records what a GPU would refuse, or punish without a word:

- `faults`: operands on two devices; a thread that uses the GPU without having set its device; memory that two streams
  use at the same time, or that is freed while another stream may still use it.
- `waits`: the places where the main thread waits for the GPU, by step: a value read, a blocking copy, a size that
  depends on content.
- `pageable`: the places of asynchronous copies from memory that is not page-locked, by step, with the largest size. The
  driver copies such memory to a buffer of its own first, and from 64 KiB on may wait for the stream.
- `collectives`: in the order of their calls, with shapes, for the GPU and (over gloo) for the host.
- `lock_error`: an error of page-locking, which the thread's next kernel launch raises once more.
- `launches`: the Triton kernels. Their code runs under Triton's interpreter.

Streams do not run at the same time here. Which work must follow which other is known all the same, from events and
waits (vector clocks, as in torch.cuda._sanitizer). To C++ the tensors are on the device `meta`: autograd would need a
driver for CUDA. So autocast, which ignores `meta`, is replaced too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import facetrain
from facetrain.device import kernel_launches

GPU = torch.device("cuda:0")
_PACKAGE = str(Path(facetrain.__file__).parent) + "/"
_COPIES = ("_to_copy", "copy_", "_foreach_copy_")
_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
    *("equal", "bincount", "is_nonzero"),
}
"""Operations whose result the host reads."""
# Of the operations that autocast runs in 16 bits on CUDA, those that facetrain's networks call.
_IN_16_BITS = {"conv2d", "linear", "matmul", "__matmul__", "bmm", "prelu", "scaled_dot_product_attention"}
_IN_FLOAT32 = {"softmax", "layer_norm", "norm", "exp", "pow"}

Clock = dict["FakeStream", int]
"""For each stream the number of its last operation that surely has ended."""


def _merge(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        into[stream] = max(into.get(stream, 0), time)


def _place() -> str:
    """Return the function of facetrain that is running: module and name."""
    frame = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    if not frame:
        return "?"
    module = frame.f_code.co_filename.removeprefix(_PACKAGE).removesuffix(".py")
    return f"{module}:{frame.f_code.co_name}"


class FakeStream:
    """CUDA stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.gpu = FakeGpu.here()
        self.gpu.require_device()
        self.device, self.time = self.gpu.device, 0
        self.clock: Clock = {}
        self.gpu.all_streams.append(self)

    def tick(self) -> int:
        """Count an operation, which follows all that the host has waited for; return its number."""
        _merge(self.clock, self.gpu.awaited)
        self.time += 1
        self.clock[self] = self.time
        return self.time

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        _merge(self.clock, stream.clock)

    def synchronize(self) -> None:
        self.gpu.wait("stream.synchronize", self.clock)

    def query(self) -> bool:
        _merge(self.gpu.awaited, self.clock)
        return True

    def __enter__(self) -> None:
        self.before, self.gpu.streams.current = self.gpu.current_stream(), self

    def __exit__(self, *_: object) -> None:
        self.gpu.streams.current = self.before


class FakeEvent:
    """CUDA event."""

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = dict((stream or FakeGpu.here().current_stream()).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or FakeGpu.here().current_stream()).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        FakeGpu.here().wait("event.synchronize", self.clock)


class Memory:
    """Block of GPU memory, and its uses by streams."""

    def __init__(self, gpu: FakeGpu, content: Tensor, stream: FakeStream) -> None:
        self.gpu, self.stream, self.content = gpu, stream, content.detach()
        self.written: tuple[FakeStream, int] = (stream, stream.time)
        self.used: Clock = {}
        self.recorded: set[FakeStream] = set()
        self.place = _place()

    def use(self, stream: FakeStream, time: int, what: str, *, write: bool) -> None:
        """Note an operation, which must follow all others that it could race with."""
        before = [self.written, *(self.used.items() if write else ())]
        for other, at in before:
            if stream.clock.get(other, 0) < at:
                self.gpu.fault(f"{what} does not wait for what another stream does with its operand")
        self.used[stream] = time
        if write:
            self.written = (stream, time)

    def __del__(self) -> None:
        for stream, time in self.used.items():
            done = max(self.stream.clock.get(stream, 0), self.gpu.awaited.get(stream, 0))
            if stream not in self.recorded and done < time:
                self.gpu.fault(f"memory of {self.place} is freed while another stream may use it")


class GpuTensor(Tensor):
    """Tensor on the fake GPU."""

    content: Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content: Tensor, memory: Memory) -> GpuTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls, content.shape, strides=content.stride(), storage_offset=content.storage_offset(),
            dtype=content.dtype, device="meta",
        )  # fmt: skip
        tensor.content, tensor.memory = content, memory
        return tensor

    is_cuda, is_cpu, is_meta = True, False, False
    device = property(lambda self: self.memory.gpu.device)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.to`. A tensor that is on the device already is not copied to it."""
        kwargs.pop("memory_format", None) if kwargs.get("memory_format") is torch.preserve_format else None
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        stays = device is None or device.type in ("cuda", "meta")
        if stays and device is not None:
            self.memory.gpu.require_index(device)
        options: dict[str, Any] = {} if layout is None else {"memory_format": layout}
        return super().to(
            "meta" if stays else device, dtype or self.dtype, non_blocking=non_blocking, copy=copy, **options
        )

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def cuda(self, *_: Any, **__: Any) -> Tensor:
        return self

    def record_stream(self, stream: FakeStream) -> None:
        self.memory.recorded.add(stream)

    def __repr__(self, **_: Any) -> str:
        return f"GpuTensor({self.content!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeGpu.here().run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Directs the operations of a thread to the fake GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeGpu.here().run(func, args, kwargs or {})


class _Autocast(TorchFunctionMode):
    """Casts the operands of functions on the fake GPU as CUDA's autocast does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = FakeGpu.here().autocast
        name = getattr(func, "__name__", "")
        if wanted is not None and name in _IN_16_BITS | _IN_FLOAT32:
            dtype = wanted if name in _IN_16_BITS else torch.float32

            def cast(x: Any) -> Any:
                is_cast = isinstance(x, GpuTensor) and x.is_floating_point() and x.dtype != torch.float64
                return x.to(dtype) if is_cast else x

            args, kwargs = tree_map(cast, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class FakeGpu:
    """GPU of this process, and what is wrong with how it is used."""

    _here: FakeGpu

    def __init__(self, index: int, capability: tuple[int, int]) -> None:
        self.device, self.capability = torch.device("cuda", index), capability
        self.faults: list[str] = []
        self.step = -1
        """Number of the training step in progress, for `waits`; whoever drives the steps counts it."""
        self.waits: dict[int, set[str]] = defaultdict(set)
        self.pageable: dict[int, dict[str, int]] = defaultdict(dict)
        self.launches: Counter[str] = Counter()
        self.collectives: dict[str, list[str]] = {"cuda": [], "cpu": []}
        self.autocast: torch.dtype | None = None
        self.awaited: Clock = {}
        self.streams, self.all_streams = threading.local(), list[FakeStream]()
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._locked: dict[int, int] = {}
        self.lock_error = 0
        """Error code with which page-locking fails; 0: it works."""
        self.last_error = threading.local()
        self._kept: list[Tensor] = []
        self._default: FakeStream | None = None

    @classmethod
    def here(cls) -> FakeGpu:
        return cls._here

    def fault(self, text: str) -> None:
        text = f"{text} (in {_place()})"
        if text not in self.faults:
            self.faults.append(text)

    def wait(self, what: str, clock: Clock | None = None) -> None:
        """Let the host wait for the work of a stream, by default of the current one."""
        if threading.current_thread() is threading.main_thread():  # the others exist to wait
            self.waits[self.step].add(f"{_place()} {what}")
        _merge(self.awaited, self.current_stream().clock if clock is None else clock)

    def wait_for_all(self, device: Any = None) -> None:
        self.wait("synchronize", {stream: stream.time for stream in self.all_streams})

    # Devices and threads

    def set_device(self, device: Any) -> None:
        device = torch.device("cuda", device) if isinstance(device, int) else device
        if device.index is None:
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got:{device}"
            )
        self.streams.has_device = True
        self.require_index(device)

    @contextmanager
    def current(self, device: Any) -> Iterator[None]:
        self.set_device(device)
        yield

    def require_device(self) -> None:
        if not getattr(self.streams, "has_device", False):
            self.fault(f"the thread {threading.current_thread().name} uses the GPU before it sets its device")

    def require_index(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index not in (None, self.device.index):
            self.fault(f"{device} is used by the rank of {self.device}")

    def current_stream(self, device: Any = None) -> FakeStream:
        if self._default is None:
            self._default = FakeStream()
        return getattr(self.streams, "current", self._default)

    # Host memory

    def lock(self, address: int, size: int, flags: int = 0) -> int:
        self.require_device()
        if self.lock_error:
            self.last_error.code = self.lock_error
        else:
            self._locked[address] = size
        return self.lock_error

    def check_error(self, code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def report_last_error(self) -> None:
        """Raise the error that CUDA has kept since an earlier call of this thread, as a launch does."""
        code, self.last_error.code = getattr(self.last_error, "code", 0), 0
        self.check_error(code)

    def unlock(self, address: int) -> int:
        del self._locked[address]
        return 0

    def pin(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self.lock(tensor.data_ptr(), tensor.untyped_storage().nbytes())
            self._kept.append(tensor)  # so that no other memory gets this address
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return not tensor.numel() or self.is_locked(tensor.data_ptr())

    def is_locked(self, address: int) -> bool:
        # A list: the thread that fetches batches locks memory meanwhile.
        locked = list(self._locked.items())
        return any(at <= address < at + size for at, size in locked)

    # Operations

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute an operation of PyTorch, and record what a GPU would do."""
        # DDP gets the bare contents from a collective over gloo, and gloo itself copies between them and its buffers.
        is_of_gloo = any(self._is_content(tensor) for tensor in _tensors(args))
        if is_of_gloo:
            args = tree_map(lambda x: self._on_gpu(x) if self._is_content(x) else x, args)
        name, tensors = func.overloadpacket.__name__, _tensors((args, kwargs))
        if func.namespace == "c10d":
            on = "cuda" if any(isinstance(tensor, GpuTensor) for tensor in tensors) else "cpu"
            self.collectives[on].append(f"{name} {[(*tensor.shape,) for tensor in tensors]}")
        wanted = kwargs.get("device")
        to_gpu = wanted is not None and torch.device(wanted).type in ("cuda", "meta")
        if to_gpu:
            self.require_index(torch.device(wanted))
        elif not any(isinstance(tensor, GpuTensor) for tensor in tensors):
            return self._run_on_host(func, args, kwargs)
        self.require_device()
        if name in _COPIES:
            if not is_of_gloo:
                self._note_copies(name, args, kwargs, to_gpu=to_gpu or wanted is None)
        else:
            self._check_operands(name, args, tensors)
            if not func.is_view and "empty" not in name:  # a copy and an allocation launch no kernel
                self.report_last_error()
        if wanted is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        is_moved = wanted is not None and not to_gpu
        if is_moved and name == "_to_copy":
            kwargs.pop("non_blocking", None)

        if not func.is_view:  # a view launches nothing
            self._note_uses(name, tensors, _written(func, args, kwargs))
        if name in _WAITING or ("index" in name and _has_mask(args)):
            self.wait(name)
        content = func(*tree_map(_content, args), **tree_map(_content, kwargs))
        if is_moved:
            return content
        result = tree_map(lambda x: self._on_gpu(x) if isinstance(x, Tensor) else x, content)
        if func.namespace == "c10d":
            return result
        return return_and_correct_aliasing(func, args, kwargs, result)

    def _run_on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.get("pin_memory")
        if is_pinned:
            kwargs = kwargs | {"pin_memory": False}
        result = func(*args, **kwargs)
        return self.pin(result) if is_pinned else result

    def _on_gpu(self, content: Tensor) -> GpuTensor:
        """Return a tensor on the GPU with a content, in the memory of other tensors that share it."""
        key = content.untyped_storage()._cdata
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(self, content, self.current_stream())
        return GpuTensor(content, memory)

    def _is_content(self, x: Any) -> bool:
        """Return whether x is not a tensor on the GPU, but the content of one."""
        is_bare = isinstance(x, Tensor) and not isinstance(x, GpuTensor) and x.layout is torch.strided
        return is_bare and x.untyped_storage()._cdata in self._memories

    def _note_uses(self, name: str, tensors: list[Any], written: set[int]) -> None:
        """Record that the current stream uses tensors, and changes those whose ids are in `written`."""
        stream = self.current_stream()
        time = stream.tick()
        for tensor in tensors:
            if isinstance(tensor, GpuTensor):
                tensor.memory.use(stream, time, name, write=id(tensor) in written)

    def _check_operands(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        # The fused optimizers walk through the memory of weights and gradients side by side.
        if name.startswith("_fused_"):
            for weight, grad in zip(*args[:2], strict=True):
                if (weight.stride(), weight.dtype) != (grad.stride(), grad.dtype):
                    self.fault(f"{name} has a gradient in another layout than its weight")
        # As on CUDA: a scalar may be on the host, because its value travels with the launch.
        if any(not isinstance(tensor, GpuTensor) and tensor.dim() for tensor in tensors) and name != "set_":
            self.fault(f"{name} has operands on two devices")
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")

    def _note_copies(self, name: str, args: Any, kwargs: dict[str, Any], *, to_gpu: bool) -> None:
        """Record the copies of an operation that the host waits for, or that are from pageable memory."""
        if name == "_to_copy":
            pairs = [(None, args[0])]
            asynchronous = kwargs.get("non_blocking", False)
        else:
            lists = args[:2] if name == "_foreach_copy_" else ([args[0]], [args[1]])
            pairs = list(zip(*lists, strict=True))
            asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        for target, source in pairs:
            from_gpu = isinstance(source, GpuTensor)
            into_gpu = isinstance(target, GpuTensor) if target is not None else to_gpu
            if from_gpu == into_gpu:
                continue
            host = target if from_gpu else source
            # PyTorch allocates page-locked memory for an asynchronous copy to the host.
            is_pinned = host is None or self.is_pinned(host)
            if not asynchronous or (from_gpu and not is_pinned):
                self.wait(f"copy {'to' if from_gpu else 'from'} the host")
            elif not is_pinned:
                found, place = self.pageable[self.step], _place()
                found[place] = max(source.nbytes, found.get(place, 0))

    def launch(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        """Launch a Triton kernel: run it under Triton's interpreter, with float32 in place of bfloat16.

        Without the interpreter the launch is only recorded, and the results have no content.
        """
        name = kernel.fn.__name__
        self.report_last_error()
        self.launches[name] += 1
        tensors = _tensors(arguments)
        if not all(isinstance(tensor, GpuTensor) for tensor in tensors):
            self.fault(f"{name} has operands on two devices")
        # Which operands a kernel changes is not known.
        self._note_uses(name, tensors, {id(tensor) for tensor in tensors})
        with torch.utils._python_dispatch._disable_current_modes():
            # The interpreter multiplies the bit patterns of bfloat16.
            wide = {id(t): t.content.float() if t.dtype == torch.bfloat16 else t.content for t in tensors}
            if type(kernel).__name__ != "JITFunction":
                kernel[grid](*(wide.get(id(x), x) for x in arguments), **options)
            for tensor in tensors:
                if tensor.dtype == torch.bfloat16:
                    tensor.content.copy_(wide[id(tensor)])


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _content(x: Any) -> Any:
    return x.content if isinstance(x, GpuTensor) else x


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of the operands that an operation changes."""
    if not func._schema.is_mutable:
        return set()
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    written = [
        (given | kwargs).get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return {id(tensor) for tensor in _tensors(written)}


def _has_mask(args: Any) -> bool:
    """Return whether an operation has boolean indices, whose number the host must read."""
    return any(tensor.dtype == torch.bool for tensor in _tensors(args[1:2]))


class _FakeAutocast:
    """Stand-in for torch.autocast."""

    def __init__(self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True) -> None:
        self._dtype = (dtype or torch.float16) if enabled else None

    def __enter__(self) -> None:
        gpu = FakeGpu.here()
        self._before, gpu.autocast = gpu.autocast, self._dtype

    def __exit__(self, *_: object) -> None:
        FakeGpu.here().autocast = self._before


@contextmanager
def fake_gpu(
    index: int = 0, count: int = 1, *, capability: tuple[int, int] = (9, 0), has_device: bool = True
) -> Iterator[FakeGpu]:
    """Give this process a fake GPU for the duration of the context, as number `index` of `count`.

    `has_device`: whether the calling thread has set its device already, which `train` does itself.
    """
    gpu = FakeGpu._here = FakeGpu(index, capability)
    gpu.streams.has_device = has_device
    begin_thread, init_group = threading.Thread.run, dist.init_process_group

    def run_thread(thread: threading.Thread) -> None:
        with _Autocast(), _Operations():  # modes belong to a thread
            begin_thread(thread)

    def join_group(backend: str, **options: Any) -> None:
        init_group("cpu:gloo,cuda:gloo" if "nccl" in backend else backend, **options)

    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: count,
        "_lazy_init": lambda: None,
        "set_device": gpu.set_device,
        "device": gpu.current,
        "current_device": lambda: index,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "Fake GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=4, total_memory=2**36
        ),
        "mem_get_info": lambda device=None: (2**36, 2**36),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": gpu.wait_for_all,
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda stream: stream,
        "current_stream": gpu.current_stream,
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=gpu.lock, cudaHostUnregister=gpu.unlock),
        "check_error": gpu.check_error,
    }

    def replace_launch(before: Any, after: Any) -> None:
        for module in [module for name, module in sys.modules.items() if name.startswith("facetrain.")]:
            if getattr(module, "launch", None) == before:
                module.launch = after  # type: ignore[attr-defined]

    launch, lifted = kernel_launches.launch, torch._C._only_lift_cpu_tensors()
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "autocast", _FakeAutocast))
        stack.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: gpu.pin(tensor.clone())))
        stack.enter_context(patch.object(Tensor, "is_pinned", gpu.is_pinned))
        stack.enter_context(patch.object(threading.Thread, "run", run_thread))
        stack.enter_context(patch.object(dist, "init_process_group", join_group))
        replace_launch(launch, gpu.launch)
        # A module of kernels that is first imported in the context has the fake's function, too.
        stack.callback(replace_launch, gpu.launch, launch)
        # torch.tensor(…, device="cuda") then copies the content by an operation, not on its own.
        torch._C._set_only_lift_cpu_tensors(True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with _Autocast(), _Operations():
                yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)
            torch.__future__.set_swap_module_params_on_conversion(swapped)
