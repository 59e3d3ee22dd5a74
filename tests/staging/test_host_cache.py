"""The cache of host memory for loaded tensors."""

from __future__ import annotations

import threading

import torch

from aiockpt.staging.host_cache import HostCache


def test_memory_is_reused_only_when_all_its_tensors_are_gone() -> None:
    memory = HostCache(1 << 30)
    one = memory.take(5 << 20).tensor
    other = memory.take(5 << 20).tensor
    assert one.data_ptr() % 4096 == other.data_ptr() % 4096 == 0
    one.fill_(1)
    other.fill_(2)
    view = one.view(torch.int32)[100:200]
    address = one.data_ptr()
    del one
    third = memory.take(5 << 20).tensor
    third.fill_(3)
    assert view.eq(0x01010101).all()
    assert memory.kept_bytes == 0
    del view
    assert memory.kept_bytes == 5 << 20
    assert memory.take(4 << 20).tensor.data_ptr() != address  # of another size
    again = memory.take(5 << 20).tensor
    assert again.data_ptr() == address
    again.fill_(4)
    assert other.eq(2).all()
    assert third.eq(3).all()


def test_the_cache_keeps_no_more_than_its_limit() -> None:
    memory = HostCache(3 << 20)
    tensors = [memory.take(1 << 20).tensor for _ in range(6)]
    del tensors
    assert memory.kept_bytes == 3 << 20
    memory.close()
    assert memory.kept_bytes == 0
    late = memory.take(1 << 20).tensor
    del late
    assert memory.kept_bytes == 0


def test_tensors_outlive_the_cache() -> None:
    memory = HostCache(1 << 30)
    tensor = memory.take((2 << 20) + 5).tensor
    tensor.copy_(torch.arange(len(tensor)) % 251)
    del memory
    assert torch.equal(tensor, (torch.arange(len(tensor)) % 251).to(torch.uint8))


def test_use_from_many_threads() -> None:
    memory = HostCache(1 << 30)
    wrong = []

    def work(value: int) -> None:
        for _ in range(200):
            tensor = memory.take(64 << 10).tensor
            tensor.fill_(value)
            if not tensor.eq(value).all():
                wrong.append(value)
            del tensor

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.kept_bytes <= 8 * (64 << 10)
