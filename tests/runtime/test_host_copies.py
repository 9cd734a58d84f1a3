"""Copies hold what was there when they were asked for; what is done with them waits until then."""

from typing import Any

import torch

from penstock.device import Device
from penstock.runtime import host_copies
from penstock.runtime.host_copies import HostCopies


class Queue:
    """A device of the host whose events come to pass when they are told to."""

    is_queued = True

    def __init__(self) -> None:
        self.done, self.events = 0, 0

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def event(self) -> Any:
        return Event(self)


class Event:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.number = queue, 0

    def record(self) -> None:
        self.queue.events += 1
        self.number = self.queue.events

    def query(self) -> bool:
        return self.number <= self.queue.done

    def synchronize(self) -> None:
        self.queue.done = max(self.queue.done, self.number)


def queue() -> tuple[Queue, HostCopies]:
    device: Any = Queue()
    return device, HostCopies(device)


def test_a_copy_holds_what_was_there_though_it_changes_later():
    _, copies = queue()
    odd, narrow = torch.arange(6.0).view(2, 3).t(), torch.ones(3, dtype=torch.bfloat16)
    found = copies.of({"odd": odd, "narrow": narrow, "scalar": torch.tensor(5)})
    odd.zero_()
    narrow.zero_()
    assert found["odd"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found["narrow"].tolist() == [1.0, 1.0, 1.0]
    assert found["scalar"].item() == 5


def test_what_is_there_twice_is_copied_once_and_given_back_once():
    _, copies = queue()
    weight = torch.ones(16)
    found = copies.of({"one": weight, "same": weight.detach(), "other": torch.ones(16)})
    assert found["one"].data_ptr() == found["same"].data_ptr() != found["other"].data_ptr()
    assert copies.pinned_bytes == 2 * 64
    copies.forget(found)
    assert copies.pinned_bytes == 0
    assert copies.most_bytes == 2 * 64


def test_files_are_written_in_order_once_their_copies_are_there():
    device, copies = queue()
    done: list[str] = []
    copies.then(lambda: done.append("before"))
    copies.then(lambda: done.append("after"))
    copies.look()
    assert done == []
    device.done = 1
    copies.look()
    assert done == ["before"]
    copies.look(waits=True)
    assert done == ["before", "after"]


def test_on_the_host_nothing_is_copied_and_nothing_waits():
    copies, done, weight = HostCopies(Device("cpu")), list[str](), torch.ones(3)
    assert copies.of({"w": weight})["w"] is weight
    copies.then(lambda: done.append("now"))
    assert done == ["now"]
    assert copies.pinned_bytes == 0
    assert weight.element_size() <= host_copies._ALIGN
