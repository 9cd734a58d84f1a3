"""Every private name of torch that Penstock uses does what it is used for.

If one of these fails on a new torch, mend `penstock._compat` and nothing else.
"""

import ast
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import penstock
from penstock import _compat

aten = torch.ops.aten


def traced(step, *tensors: Tensor) -> fx.GraphModule:
    mode = _compat.fake_mode()
    with _compat.tracing_session(mode):
        fakes = [_compat.as_fake(mode, tensor) for tensor in tensors]
        return _compat.make_fx(step, record_stack_traces=False)(*fakes)


def ops(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def scripted_gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x) + F.softplus(x)


def loss_and_gradient(x: Tensor, w: Tensor) -> list[Tensor]:
    with _compat.tracing_backward():
        loss = (x @ w).tanh().sum()
        (gradient,) = torch.autograd.grad(loss, [w])
    return [loss.detach(), gradient]


def test_fake_tensor_has_the_shape_layout_and_gradient_flag_of_the_real_one() -> None:
    real = nn.Parameter(torch.ones(4, 3).t())
    fake = _compat.as_fake(_compat.fake_mode(), real)
    assert (tuple(fake.shape), fake.stride(), fake.requires_grad) == ((3, 4), (1, 3), True)
    assert all(type(size) is int for size in fake.shape)


def test_fake_mode_takes_real_constants() -> None:
    constant = torch.ones(3)
    mode = _compat.fake_mode()
    with mode:
        total = _compat.as_fake(mode, torch.ones(3)) + constant
    assert tuple(total.shape) == (3,)


BACKWARD_IN_A_FORK = """
import os, torch
from penstock import _compat

def backward():
    torch.ones(3, requires_grad=True).square().sum().backward()

with _compat.fake_mode():
    torch.ones(3)
backward()
child = os.fork()
if not child:
    backward()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs ranks are not forked")
def test_process_that_used_a_fake_mode_can_be_forked_and_compute_a_backward() -> None:
    command = [sys.executable, "-W", "ignore", "-c", BACKWARD_IN_A_FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_traced_backward_ops_are_marked_and_repeat_the_number_of_their_forward_op() -> None:
    nodes = ops(traced(loss_and_gradient, torch.ones(2, 3), nn.Parameter(torch.ones(3, 4))))
    number = {node.target: node.meta["seq_nr"] for node in nodes}
    assert number[aten.tanh_backward.default] == number[aten.tanh.default]
    backward = {node.target for node in nodes if node.meta.get("autograd_backward")}
    assert aten.tanh_backward.default in backward
    assert aten.tanh.default not in backward


def test_annotation_reaches_the_traced_op() -> None:
    def step(x: Tensor) -> Tensor:
        with _compat.annotate({"module": "here"}):
            x = x.sin()
        return x.cos()

    sin, cos = ops(traced(step, torch.ones(2)))
    assert sin.meta["custom"]["module"] == "here"
    assert "module" not in cos.meta.get("custom", {})


def test_grouped_product_is_traced_in_float32_and_its_rule_put_back() -> None:
    rules = dict(_compat.op_implementations_dict)

    def step(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, ends)

    sizes = torch.tensor([16, 32], dtype=torch.int32)
    module = traced(step, torch.ones(32, 16), torch.ones(2, 16, 8), sizes)
    assert tuple(ops(module)[-1].meta["val"].shape) == (32, 8)
    assert dict(_compat.op_implementations_dict) == rules


def test_reparametrized_module_computes_with_other_tensors_also_where_they_are_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    before, other = model["a"].weight, torch.full((2, 2), 7.0)
    with _compat.reparametrize(model, {"a.weight": other}):
        assert model["a"].weight is other
        assert model["b"].weight is other
    assert model["a"].weight is model["b"].weight is before


def test_a_backward_pass_is_told_from_all_else() -> None:
    seen: list[bool] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(_compat.in_backward()))
    loss = x * 2
    assert not _compat.in_backward()
    loss.backward()
    assert seen == [True]
    assert not _compat.in_backward()


@pytest.mark.parametrize("times", [2, 3])
def test_module_under_several_names_has_its_own_tensors_again(times: int) -> None:
    layer = nn.BatchNorm1d(2)
    held = (layer.weight, layer.running_mean)
    others = {"0.weight": torch.full((2,), 7.0), "0.running_mean": torch.full((2,), 8.0)}
    with _compat.reparametrize(nn.ModuleList([layer] * times), others):
        assert layer.weight is others["0.weight"]
        assert layer.running_mean is others["0.running_mean"]
    assert layer.weight is held[0]
    assert layer.running_mean is held[1]


@pytest.mark.parametrize(
    ("call", "random"),
    [
        (lambda q: F.dropout(q, 0.5), True),
        (lambda q: torch.rand(3) + q.sum(), True),
        (lambda q: F.scaled_dot_product_attention(q, q, q), False),
        (lambda q: q.softmax(-1), False),
    ],
)
def test_random_ops_are_known(call, random: bool) -> None:
    found: list[bool] = []

    class Watch(_compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(_compat.draws_random(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Watch():
        call(torch.ones(1, 2, 4, 8))
    assert any(found) == random


@pytest.mark.parametrize(("dropout", "random"), [(0.0, False), (0.5, True)])
def test_fused_attention_is_random_only_with_dropout(dropout: float, random: bool) -> None:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.ones(1, 2, 4, 8)
    assert _compat.draws_random(op, (q, q, q, dropout), {}) == random
    assert _compat.draws_random(op, (q, q, q), {"dropout_p": dropout}) == random


def test_tensors_of_torchs_own_kinds_can_become_each_other() -> None:
    """Of another key they cannot: sparse ones, or those of a vendor's device (tests/rehearsal)."""
    one, other = torch.zeros(2), torch.ones(3)
    assert _compat.can_become(one, other)
    assert not _compat.can_become(one, other.to_sparse())
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        one.data = other.to_sparse()
    one.data = other
    assert one.tolist() == [1.0, 1.0, 1.0]


def test_memory_profile_notes_allocations_releases_and_marks_in_order() -> None:
    gc.collect()  # what tests before this one have left
    with _compat.memory_profile() as events:
        a = torch.empty(1000)
        _compat.memory_mark(1)
        b = torch.empty(500)
        _compat.memory_mark(2)
        del a
        gc.collect()
        del b
    found = [(event.size_bytes, event.is_mark) for event in events()]
    assert found == [
        (4000, False),
        (0, True),
        (2000, False),
        (0, True),
        (-4000, False),
        (-2000, False),
    ]


def test_memory_profile_takes_no_block_for_another_that_lay_there_before() -> None:
    with _compat.memory_profile():
        seen = [torch.empty(size, dtype=torch.uint8) for size in range(1000, 200_000, 1000)]
    places = {block.data_ptr() for block in seen}
    sizes = [block.numel() for block in seen]
    del seen  # unseen by any profile
    later = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    assert places & {block.data_ptr() for block in later}, "else there is nothing to mistake"
    with _compat.memory_profile() as events:
        later.clear()
        again = torch.empty(500)
        del again
    assert [event.size_bytes for event in events()] == [2000, -2000]


def test_memory_profile_leaves_stderr_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    with _compat.memory_profile():
        torch.empty(3)
    print("seen", file=__import__("sys").stderr)
    assert capfd.readouterr().err == "seen\n"


def test_unrecorded_call_is_not_in_a_profile_and_the_next_one_is() -> None:
    x = torch.ones(8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert float(_compat.unrecorded(torch.dot)(x, x)) == 8.0
        x.exp()
    names = {event.name for event in profiler.events()}
    assert "aten::exp" in names
    assert "aten::dot" not in names


def test_gradient_hooks_of_a_parameter_are_seen() -> None:
    plain, first, second = (nn.Parameter(torch.ones(1)) for _ in range(3))
    first.register_hook(lambda gradient: None)
    second.register_post_accumulate_grad_hook(lambda parameter: None)
    weights = plain, first, second
    assert [_compat.has_gradient_hook(p) for p in weights] == [False, True, True]
    assert [_compat.hooks_behind(p) != () for p in weights] == [False, False, True]


def test_hooks_before_are_called_in_the_order_in_which_they_were_given() -> None:
    def halve(gradient: Tensor) -> Tensor:
        return gradient / 2

    weight = nn.Parameter(torch.ones(1))
    assert _compat.hooks_before(weight) == ()
    weight.register_hook(torch.neg)
    weight.register_hook(halve)
    assert _compat.hooks_before(weight) == (torch.neg, halve)


def test_storage_key_is_shared_by_views_only() -> None:
    whole = torch.ones(4)
    assert _compat.storage_key(whole) == _compat.storage_key(whole[1:].view(3))
    assert _compat.storage_key(whole) != _compat.storage_key(whole.clone())
    mode = _compat.fake_mode()
    fake = _compat.as_fake(mode, whole)
    with mode:
        assert _compat.storage_key(fake) == _compat.storage_key(fake[1:])


def test_schema_tells_views_and_writes() -> None:
    assert [r.alias_info is not None for r in _compat.schema_of(aten.view.default).returns] == [
        True
    ]
    assert [r.alias_info is not None for r in _compat.schema_of(aten.sin.default).returns] == [
        False
    ]
    assert _compat.schema_of(aten.add_.Tensor).arguments[0].alias_info.is_write
    assert _compat.schema_of(aten.add_.Tensor).is_mutable
    assert not _compat.schema_of(aten.add.Tensor).is_mutable
    assert _compat.schema_of(len) is None


def test_packet_is_the_op_of_an_overload() -> None:
    assert _compat.packet_of(aten.add.Tensor) is aten.add
    assert _compat.packet_of(len) is None


def test_add_in_place_adds_pairwise() -> None:
    sums = [torch.ones(2), torch.zeros(3)]
    _compat.add_in_place(sums, [torch.ones(2), torch.ones(3)])
    assert [total.tolist() for total in sums] == [[2, 2], [1, 1, 1]]


def test_named_modules_are_those_of_the_model() -> None:
    names = [name for name, _ in _compat.named_modules(nn.Sequential(nn.ReLU(), nn.ReLU()))]
    assert names == ["", "0", "1"]


def test_below_autograd_records_no_graph_even_in_grad_mode() -> None:
    weight = nn.Parameter(torch.ones(2))
    with _compat.below_autograd():
        assert not (weight * 2).requires_grad
    assert (weight * 2).requires_grad


def test_dynamo_keeps_item_in_its_graph() -> None:
    found: list[str] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]):
        found.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    def step(x: Tensor) -> Tensor:
        return x * x.sum().item()

    with _compat.dynamo_scalars(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(step, backend=backend, fullgraph=True)(torch.ones(2))
    torch.compiler.reset()
    assert "item" in found


def test_dynamo_assumes_what_a_whole_number_is_where_code_follows_it() -> None:
    count, found = torch.tensor(3), list[list[str]]()

    def backend(module: fx.GraphModule, inputs: list[Tensor]):
        found.append(_compat.dynamo_assumes())
        return module.forward

    def branch(x: Tensor) -> Tensor:
        return x * 2 if int(count) < 48 else x

    for step in (branch, lambda x: x * count, lambda x: x.repeat(2)):
        torch.compiler.reset()
        with _compat.dynamo_scalars():
            torch.compile(step, backend=backend, fullgraph=True, dynamic=False)(torch.ones(2))
    torch.compiler.reset()
    assert [len(assumed) for assumed in found] == [1, 0, 0]
    assert "< 48" in found[0][0]


def test_class_is_opened_once_it_has_been_taught() -> None:
    class Pair:
        def __init__(self, left: object, right: object) -> None:
            self.left, self.right = left, right

    pair = Pair(1, 2)
    assert not _compat.opens(pair)
    _compat.open_as(Pair, lambda p: ([p.left, p.right], "pair"), lambda c, _: Pair(*c))
    assert _compat.opens(pair)
    leaves, spec = _compat.pytree.tree_flatten([pair])
    assert leaves == [1, 2]
    (again,) = _compat.pytree.tree_unflatten([3, 4], spec)
    assert (type(again), again.left, again.right) == (Pair, 3, 4)
    assert _compat.opens({})
    assert not _compat.opens(3)


def test_pytree_gives_leaves_and_structure_and_takes_them_back() -> None:
    batch = {"b": [1, None], "a": (torch.ones(1), "x")}
    leaves, spec = _compat.pytree.tree_flatten(batch)
    assert len(leaves) == 4
    assert _compat.pytree.tree_unflatten(leaves, spec) == batch
    assert spec == _compat.pytree.tree_flatten({"b": [2, 3], "a": (4, 5)})[1]
    assert spec != _compat.pytree.tree_flatten({"b": [2, 3], "a": [4, 5]})[1]


def private_names(path: Path) -> list[str]:
    """Return the private names of torch that a file reads: torch._x, and imports of torch._y."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [f"{path.name}: {name}" for name in names if name.startswith("_")]
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if owner.startswith("torch") and "ops" not in owner:
                found.append(f"{path.name}: {owner}.{node.attr}")
    return found


@pytest.mark.parametrize("room", ["graph", "profile"])
def test_no_other_file_of_a_room_uses_a_private_name_of_torch(room: str) -> None:
    files = sorted((Path(penstock.__file__).parent / room).glob("*.py"))
    assert [name for file in files for name in private_names(file)] == []


class Listing(torch.distributed.ProcessGroup):
    """A group in Python, as those of others may be, that knows lists of tensors only."""

    def allgather(self, outs, ins, opts=None):
        return "gathered", [part.tolist() for part in outs[0]], ins[0].tolist()

    def reduce_scatter(self, outs, ins, opts=None):
        return "scattered", outs[0].tolist(), [part.tolist() for part in ins[0]]


def test_a_group_without_the_call_for_a_flat_tensor_takes_its_parts() -> None:
    whole = torch.arange(4.0)
    parts = list(whole.split(2))
    group = Listing(0, 2)
    expected = [[0.0, 1.0], [2.0, 3.0]]
    assert _compat.gather_flat(group, whole, parts[1], parts) == ("gathered", expected, [2.0, 3.0])
    assert _compat.scatter_flat(group, parts[0], whole, parts) == (
        "scattered", [0.0, 1.0], expected,
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_averages_move_by_a_share_of_the_way(share: float) -> None:
    averages = [torch.zeros(3), torch.full((2, 2), 4.0)]
    weights = [torch.ones(3), torch.full((2, 2), 8.0)]
    _compat.move_towards(averages, weights, share)
    assert averages[0].tolist() == [share] * 3
    assert averages[1].flatten().tolist() == [4.0 + 4.0 * share] * 4
    _compat.add_number(averages, 1.0)
    assert averages[0].tolist() == [share + 1.0] * 3


def test_gradient_norms_are_those_that_clipping_takes() -> None:
    gradients = [torch.randn(3, 5), torch.randn(7).bfloat16()]
    expected = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    found = _compat.gradient_norms(gradients)
    assert [norm.dtype for norm in found] == [torch.float32, torch.bfloat16]
    assert all(map(torch.equal, found, expected))
    assert _compat.gradient_norms([]) == []


def test_groups_by_dtype_hold_every_place_once_and_in_order() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float32, torch.float64)
    groups = _compat.groups_by_dtype([torch.zeros(2, dtype=kind) for kind in kinds])
    assert sorted(groups) == [[0, 2], [1], [3]]
    assert _compat.groups_by_dtype([]) == []


def test_hooks_of_one_optimizer_and_of_all_are_seen() -> None:
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert not _compat.has_step_hooks(made)
    made.register_step_post_hook(lambda *_: None).remove()
    assert not _compat.has_step_hooks(made)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert _compat.has_step_hooks(made)
    handle.remove()
    made.register_step_pre_hook(lambda *_: None)
    assert _compat.has_step_hooks(made)


def test_norms_of_torch_are_known_and_hooks_on_modules_seen() -> None:
    class Own(nn.BatchNorm1d):
        pass

    assert all(map(_compat.is_norm, (nn.BatchNorm2d(3), nn.InstanceNorm1d(3))))
    assert not any(map(_compat.is_norm, (Own(3), nn.LayerNorm(3), nn.GroupNorm(1, 3))))
    norm = nn.BatchNorm1d(3)
    assert not _compat.has_forward_hooks(norm)
    for register in (norm.register_forward_hook, norm.register_forward_pre_hook):
        handle = register(lambda *_: None)
        assert _compat.has_forward_hooks(norm)
        handle.remove()
    assert not _compat.has_forward_hooks(norm)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "Adafactor", "Muon", "RAdam"])
def test_torchs_optimizers_have_no_attributes_of_their_own(name: str) -> None:
    made = getattr(torch.optim, name)([nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    assert _compat.added_attributes(made) == {}
    made.count = 3
    assert _compat.added_attributes(made) == {"count": 3}


def test_step_that_a_scheduler_patches_is_left_out_and_warns_of_no_order() -> None:
    made = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    assert "step" in vars(made)
    assert "step" not in _compat.without_scheduler(vars(made))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _compat.without_order_warning(made)
        schedule.step()
    assert made.param_groups[0]["lr"] == 0.05


def test_unscale_divides_and_says_whether_all_are_finite() -> None:
    gradients = [torch.tensor([8.0, -4.0]), torch.tensor([2.0])]
    assert _compat.unscale(gradients, 4.0)
    assert [g.tolist() for g in gradients] == [[2.0, -1.0], [0.5]]
    for odd in (torch.inf, torch.nan):
        assert not _compat.unscale([torch.tensor([1.0]), torch.tensor([odd, 1.0])], 4.0)


@pytest.mark.long
def test_inductor_compiles_ops_that_take_one_list_and_give_what_was_asked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is kept from one run of the tests to the next: the first one takes seconds."""
    kept = request.config.cache.mkdir("inductor")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    _compat.keep_compiled_code(kept)
    if why := _compat.why_no_compiler(torch.device("cpu")):
        pytest.skip(why)
    module = traced(lambda x, y: [(F.gelu(x) + y).t(), x * y], torch.ones(4, 3), torch.ones(3))
    layout = partial(_compat.StridedForm, dtype=torch.float32, device=torch.device("cpu"))
    call = _compat.compiled_by_inductor(
        module, [layout((4, 3), (3, 1)), layout((3,), (1,))], [(1, 3), (3, 1)]
    )
    assert callable(call)
    assert any(kept.rglob("*.so"))
    x, y = torch.linspace(-2, 2, 12).view(4, 3), torch.tensor([1.0, 2.0, 3.0])
    given = [x.clone(), y.clone()]
    turned, product = call(given)
    assert given == []
    assert (turned.stride(), product.stride()) == ((1, 3), (3, 1))
    torch.testing.assert_close(turned, (0.5 * x * (1 + torch.erf(x / 2**0.5)) + y).t())
    assert torch.equal(product, x * y)


def test_a_shell_that_says_where_compiled_code_is_kept_is_heard(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    _compat.keep_compiled_code(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"


def test_without_a_compiler_it_says_so() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}):
        assert _compat.why_no_compiler(torch.device("cpu")) == "no C++ compiler"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_rank_alone_sums_over_nccl() -> None:
    store = torch.distributed.HashStore()
    group = _compat.nccl_group(store, 0, 1, timedelta(seconds=10))
    own = torch.ones(2, device="cuda")
    group.allreduce([own]).wait()
    assert own.tolist() == [1.0, 1.0]


def test_a_rank_alone_sums_over_gloo() -> None:
    store = torch.distributed.HashStore()
    group = _compat.gloo_group(store, 0, 1, "127.0.0.1", timedelta(seconds=10))
    own = torch.ones(2)
    group.allreduce([own]).wait()
    assert own.tolist() == [1.0, 1.0]
    _compat.gather_flat(group, own, own, [own]).wait()
    _compat.scatter_flat(group, own, own, [own]).wait()
    assert own.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_scripted_function_runs_the_same_ops_in_every_call() -> None:
    names: list[list[str]] = []

    class Noted(_compat.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(scripted_gate)
    with _compat.scripts_as_written(), torch.autograd.set_multithreading_enabled(False):
        for _ in range(4):
            names.append([])
            x = torch.ones(3, requires_grad=True)
            with Noted():
                scripted(x).sum().backward()
    assert names[0] == names[1] == names[2] == names[3]
    assert "aten.sigmoid.default" in names[0]
    assert torch._C._get_graph_executor_optimize()


def test_a_process_without_a_parent_numbers_its_children_from_the_first():
    from penstock.processes.child import in_a_fork

    def look(beat):
        _compat.forget_parent_process()
        fork = multiprocessing.get_context("fork")
        return [multiprocessing.parent_process() is None, fork.Process(target=int).name]

    assert in_a_fork(look, 30) == [True, "ForkProcess-1"]


def test_something_is_called_after_the_signal_handlers_of_a_data_worker() -> None:
    from torch.utils.data._utils import signal_handling

    before, called = signal_handling._set_worker_signal_handlers, list[object]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            signal_handling, "_set_worker_signal_handlers", lambda: called.append("torch")
        )
        with _compat.after_worker_signals(lambda: called.append("own")):
            signal_handling._set_worker_signal_handlers()
        signal_handling._set_worker_signal_handlers()
    assert called == ["torch", "own", "torch"]
    assert signal_handling._set_worker_signal_handlers is before


def test_tensor_that_becomes_another_is_it_wherever_it_is_held() -> None:
    fake = _compat.as_fake(_compat.fake_mode(), torch.ones(3))
    held, real = {"both": (fake, 1)}, torch.arange(3.0)
    _compat.become(fake, real)
    assert type(held["both"][0]) is Tensor
    assert torch.equal(held["both"][0] + 1, torch.arange(1.0, 4.0))
    assert _compat.is_fake(real)


def test_node_of_a_tensor_and_its_constant_are_found_while_recording() -> None:
    seen: list[object] = []
    constant = torch.arange(3.0)

    def step(x: Tensor) -> Tensor:
        y = x * constant
        node = _compat.node_of(y)
        assert node is not None
        seen.append(str(node.target))
        (held,) = [one for one in node.all_input_nodes if one.op == "get_attr"]
        seen.append(_compat.traced_constant(held))
        with _compat.no_modes():
            seen.append(type(torch.ones(2)))
        return y

    traced(step, torch.ones(3))
    assert seen[0] == "aten.mul.Tensor"
    assert seen[1] is constant
    assert seen[2] is Tensor
    assert _compat.node_of(torch.ones(1)) is None


def test_ops_are_named_as_a_recording_names_them() -> None:
    graph = traced(lambda x: torch.relu(x.add_(1)) + torch.relu(x), torch.ones(3)).graph
    next(node for node in graph.nodes if "add_" in str(node.target)).target = aten.add.Tensor
    _compat.name_by_ops(graph)
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == ["add", "relu", "relu_1", "add_1"]


def test_unsaved_buffers_are_those_of_no_state_dict() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("mask", torch.ones(2), persistent=False)
    model[1].register_buffer("table", None, persistent=False)
    model.register_buffer("steps", torch.zeros(1), persistent=False)
    assert list(_compat.unsaved_buffers(model)) == ["steps", "1.mask"]
    assert _compat.unsaved_buffers(model)["1.mask"] is model[1].mask
