"""Device: what a process computes on, here a CPU; on an accelerator, tests/rehearsal."""

import ast
import random

import pytest
import torch

from penstock import device
from penstock.device import Device, here, of
from tests.test_layers import modules

HOST = Device("cpu")


def test_process_on_a_machine_without_an_accelerator_computes_on_its_cores() -> None:
    assert here() == HOST
    assert (here().place, here().backend, here().name) == (torch.device("cpu"), "gloo", "cpu")
    assert device.all_here() == ()
    assert (device.idle_kind(), device.idle_words()) == ("", "")


def test_cpu_queues_nothing_and_its_forks_compute() -> None:
    assert (HOST.is_queued, HOST.has_copy_engine) == (False, False)
    assert HOST.can_fork


def test_accelerator_queues_and_is_no_device_of_forks() -> None:
    near = of(torch.device("cuda", 1))
    assert near.place == torch.device("cuda:1")
    assert near.is_queued
    assert not near.can_fork


def test_accelerator_of_a_kind_without_a_row_stays_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.device("xpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: other
    )
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    device._kind.cache_clear()
    try:
        assert here() == HOST
        assert device.idle_kind() == "xpu"
        assert "accelerator of kind xpu" in device.idle_words()
    finally:
        device._kind.cache_clear()


def test_entering_seeding_and_waiting_leave_a_cpu_as_it_is() -> None:
    before = torch.get_rng_state()
    HOST.enter()
    HOST.seed(random.randrange(100))
    HOST.set_random_state(HOST.random_state())
    HOST.synchronize()
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_drawn_meanwhile_moves_no_generator() -> None:
    before = torch.get_rng_state()
    with HOST.random_kept():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def test_plan_may_use_what_context_products_and_gaps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    total = property(lambda device: 80 * 10**9)
    monkeypatch.setattr(Device, "total_bytes", total)
    monkeypatch.setattr(device, "_taken_bytes", lambda own: 600 * 2**20)
    assert Device("cuda").usable_bytes == 80 * 10**9 - 600 * 2**20 - int(0.03 * 80 * 10**9)
    monkeypatch.setattr(Device, "total_bytes", property(lambda device: 100))
    assert Device("cuda").usable_bytes == 0


def test_one_file_alone_names_a_kind_of_accelerator() -> None:
    """`torch.cuda`, "cuda" and comparisons with "cpu" of a device's type stand in device.py."""
    named = {
        f"{file}:{node.lineno}"
        for file, tree in modules().items()
        for node in ast.walk(tree)
        if file != "device.py" and _names_a_kind(node)
    }
    assert sorted(named) == []


def _names_a_kind(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="torch"), attr="cuda") | ast.Constant("cuda"):
            return True
        case ast.Compare(left=ast.Attribute(attr="type"), comparators=[ast.Constant("cpu")]):
            return True
        case _:
            return False
