"""Faults that are planted to see that the fake GPU finds them."""

import threading
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from facetrain.data.loading.device_prefetch import DevicePrefetcher
from facetrain.device.page_locked import page_locked
from facetrain.device.thread_device import use_device
from facetrain.distributed import collectives
from tests.support.fake_gpu import GPU, FakeStream, fake_gpu


def race(gpu):
    x, side = torch.ones(4, device=GPU), torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)


def free_too_early(gpu):
    side, computing = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        x = torch.ones(4, device=GPU)
    computing.wait_stream(side)
    x.add_(1)


def thread_without_device(gpu):
    thread = threading.Thread(target=partial(torch.ones, 4, device=GPU))
    thread.start()
    thread.join()


def other_layout(gpu):
    weight = torch.nn.Parameter(
        torch.ones(4, 4, 3, 3, device=GPU).contiguous(memory_format=torch.channels_last)
    )
    weight.grad = torch.ones(4, 4, 3, 3, device=GPU)
    torch.optim.SGD([weight], lr=0.1, fused=True).step()


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (race, "does not wait for what another stream does"),
        (free_too_early, "is freed while another stream may use it"),
        (thread_without_device, "uses the GPU before it sets its device"),
        (lambda gpu: torch.ones(4, device="cuda:1"), "cuda:1 is used by the rank of cuda:0"),
        (other_layout, "a gradient in another layout"),
    ],
)
def test_a_planted_fault_is_found(plant, text):
    with fake_gpu(count=2) as gpu:
        plant(gpu)
    assert any(text in fault for fault in gpu.faults)


def test_operands_on_two_devices_are_refused():
    with fake_gpu() as gpu:
        x = torch.ones(4, device=GPU)
        assert (x + torch.tensor(1.0)).cpu().tolist() == [2.0] * 4, "a scalar may be on the host"
        with pytest.raises(RuntimeError, match="on the same device"):
            x + torch.ones(4)
    assert len(gpu.faults) == 1


def test_an_error_that_cuda_keeps_is_raised_once_by_the_next_launch():
    with fake_gpu() as gpu:
        x, gpu.lock_error = torch.ones(4, device=GPU), 2
        assert torch.cuda.cudart().cudaHostRegister(4096, 1) == 2
        y = torch.empty_like(x)
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            y.add_(x)
        y.add_(x)


def test_memory_that_cannot_be_page_locked_leaves_no_error_to_the_next_launch():
    with fake_gpu() as gpu:
        gpu.lock_error = 2
        with pytest.raises(RuntimeError, match="CUDA error 2"):
            page_locked(torch.Size([4]), torch.float32)
        torch.ones(4, device=GPU).add_(1)
        slots = np.zeros((3, 4), np.uint8)
        batches = DevicePrefetcher(slots, GPU)
        torch.ones(4, device=GPU).add_(1)
        assert batches.slot_to_device(1).cpu().tolist() == [0] * 4
        batches.close()


@pytest.mark.parametrize("is_idle", [True, False])
def test_page_locked_slots_stay_mapped_until_they_are_unlocked(is_idle, monkeypatch):
    with fake_gpu() as gpu:
        slots, next_slots = np.zeros((3, 4), np.uint8), np.zeros((3, 4), np.uint8)
        exists, address = weakref.ref(slots), slots.ctypes.data
        batches = DevicePrefetcher(slots, GPU)
        assert gpu.is_locked(address)
        monkeypatch.setattr(FakeStream, "query", lambda stream: is_idle)
        batches.close()
        batches.close()
        del batches, slots
        assert gpu.is_locked(address) == (exists() is not None) == (not is_idle)
        of_next_stage = DevicePrefetcher(next_slots, GPU)
        monkeypatch.undo()
        of_next_stage.wait_for_transfers()
        assert exists() is None and not gpu.is_locked(address)
        of_next_stage.close()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool(x[0] > 0),
        lambda x: torch.ones(4).to(GPU),
        lambda x: torch.empty(4).copy_(x, non_blocking=True),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().record_event().synchronize(),
    ],
)
def test_every_way_in_which_the_host_waits_is_found(wait):
    with fake_gpu() as gpu:
        x = torch.ones(4, device=GPU)
        wait(x)
        assert len(gpu.waits[-1]) == 1 and not gpu.pageable


def test_what_is_right_is_not_reported():
    def use_the_gpu():
        use_device(GPU)
        torch.ones(4, device=GPU)

    with fake_gpu() as gpu:
        side, computing = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            x = torch.ones(4).pin_memory().to(GPU, non_blocking=True)
        computing.wait_stream(side)
        x.add_(1)
        x.record_stream(computing)
        del x
        layer = torch.nn.Linear(4, 4, device=GPU)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(torch.ones(2, 4, device=GPU))
        y.float().sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1, fused=True).step()
        thread = threading.Thread(target=use_the_gpu)
        thread.start()
        thread.join()
        torch.ones(4).to(GPU, non_blocking=True)
        assert list(gpu.pageable[-1].values()) == [16]
    assert y.dtype == torch.bfloat16 and layer.weight.grad.device == GPU
    assert not gpu.faults and not gpu.waits


def test_a_rank_that_swaps_two_collectives_differs_from_the_others():
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    found = []
    for rank in range(2):
        with fake_gpu(rank, 2) as gpu:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
            try:
                x = torch.ones(4, device=gpu.device)
                calls = [lambda: collectives.sum_(x), lambda: collectives.gather(x)]  # noqa: B023
                for call in reversed(calls) if rank else calls:
                    call()
            finally:
                dist.destroy_process_group()
            found.append(gpu.collectives["cuda"])
    assert found[0] != found[1] and sorted(found[0]) == sorted(found[1])
    assert [name.split()[0] for name in found[0]] == ["allreduce_", "_allgather_base_"]
