"""The operator as torch sees it: schema, fake kernel, autograd, one graph under compile, export."""

import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.cases import FUSED, HERE, make
from traformer.errors import InputError
from traformer.ops import available_backends, threshold_relative_attention
from traformer.ops.threshold_relative import backends, blockwise, registration
from traformer.ops.threshold_relative.backends import BACKENDS, Backend
from traformer.ops.threshold_relative.options import make_problem
from traformer.ops.threshold_relative.problem import Problem
from traformer.ops.threshold_relative.registration import forward_op


def arguments(backend, **changes):
    q, k, v, g = make(queries=9, keys=12, dtype=torch.float32)
    return backend, *make_problem(q, k, v, g, {})._replace(**changes)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"threshold": torch.full((2, 4, 9), 0.2), "exclude_self": torch.tensor([True, False, True, False])},
        {"dropout_p": 0.5, "dropout_seed": torch.tensor(3), "key_padding_mask": torch.rand(2, 12) > 0.5},
        {"threshold": torch.full((2, 4, 9), 0.2, requires_grad=True), "surrogate_width": 0.5},
    ],
    ids=["plain", "threshold", "dropout", "surrogate"],
)
def test_opcheck(backend, changes):
    torch.library.opcheck(forward_op, arguments(backend, **changes))


@pytest.mark.parametrize("backend", HERE)
def test_one_graph_under_compile(backend):
    inputs = make(queries=33, dtype=torch.float32)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def function(*x):
        return threshold_relative_attention(*x, backend=backend).sum(-1)

    compiled = torch.compile(function, fullgraph=True, backend=count)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", FUSED)
def test_gradients_through_aot_autograd(backend):
    inputs = make(queries=33, dtype=torch.float32)

    def function(*x):
        return threshold_relative_attention(*x, backend=backend, dropout_p=0.1, dropout_seed=3).square().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(function(*inputs), inputs)
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", FUSED)
def test_export(backend):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, g):
            return threshold_relative_attention(q, k, v, g, backend=backend)

    inputs = tuple(x.detach() for x in make(queries=33, dtype=torch.float32))
    length = torch.export.Dim("length", min=2, max=4096)
    dims = tuple({2: length} for _ in inputs)
    program = torch.export.export(Module(), inputs, dynamic_shapes=dims)
    longer = tuple(x.detach() for x in make(queries=70, dtype=torch.float32))
    torch.testing.assert_close(program.module()(*longer), Module()(*longer))


def test_a_backend_is_one_module_and_one_entry(monkeypatch):
    """A made-up backend that negates the output: the operator finds it, and autograd and "auto" go through it."""
    module = types.ModuleType("traformer.ops.threshold_relative.mirror")
    module.unavailable_reason = lambda: None
    module.unsupported_reason = lambda dtype, head_size: None if head_size == 16 else "backend 'mirror' takes size 16"
    module.forward = lambda problem: (lambda result: result._replace(out=-result.out))(blockwise.forward(problem))
    module.output = lambda problem: module.forward(problem).out
    module.backward = lambda problem, grad_out, saved: blockwise.backward(
        problem, -grad_out, saved._replace(out=-saved.out)
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BACKENDS, "mirror", Backend("mirror", fused=True, device="cpu", dtypes=(torch.float32,)))
    monkeypatch.setattr(backends, "_MODULES", {})
    assert available_backends()[-1] == "mirror"
    inputs = make(queries=9, width=16, dtype=torch.float32)
    expected = threshold_relative_attention(*inputs, backend="blockwise")
    for name in ("mirror", "auto"):
        out = threshold_relative_attention(*inputs, backend=name)
        torch.testing.assert_close(out, -expected)
        for a, b in zip(
            torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs, retain_graph=True),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(a, -b)
    with pytest.raises(InputError, match="takes size 16"):
        threshold_relative_attention(*make(queries=9, width=8, dtype=torch.float32), backend="mirror")


def test_an_option_reaches_every_backend_through_its_field():
    """A Problem's fields are the operator's arguments, in order and by name: nothing else lists them."""
    schema = torch.ops.traformer.threshold_relative_attention.default._schema
    assert [argument.name for argument in schema.arguments] == ["backend", *Problem._fields]
    problem = make_problem(*make(queries=9, dtype=torch.float32), {"threshold": 0.3, "surrogate_width": 0.5})
    assert (problem.threshold_value, problem.surrogate_width) == (0.3, 0.5)


class Noticed(torch.Tensor):
    """A subclass that behaves like a tensor, but may have wishes of its own."""


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def profiled(function, inputs):
    with torch.profiler.profile() as profile:
        function(*inputs)
    assert any(event.key == "traformer::threshold_relative_attention" for event in profile.key_averages())


def with_mode(mode):
    def run(function, inputs):
        with mode():
            function(*inputs)

    return run


def faked(function, inputs):
    with FakeTensorMode() as mode:
        out = function(*(mode.from_tensor(x) for x in inputs))
    assert isinstance(out, FakeTensor)


WAYS_TORCH_TAKES_PART = {
    "autograd": lambda function, inputs: function(inputs[0].requires_grad_(), *inputs[1:]),
    "dispatch mode": with_mode(Watching),
    "function mode": with_mode(Listening),
    "subclass": lambda function, inputs: function(inputs[0].as_subclass(Noticed), *inputs[1:]),
    "fake tensors": faked,
    "meta": lambda function, inputs: function(*(x.to("meta") for x in inputs)),
    "make_fx": lambda function, inputs: make_fx(function)(*inputs),
    "make_fx before dispatch": lambda function, inputs: make_fx(function, pre_dispatch=True)(*inputs),
    "jit trace": lambda function, inputs: torch.jit.trace(function, inputs, check_trace=False),
    "profiler": profiled,
}


@pytest.fixture
def operator_calls(monkeypatch):
    """How often the registered operator was called from Python."""
    calls = []

    def counted(*arguments):
        calls.append(arguments[0])
        return forward_op(*arguments)

    monkeypatch.setattr(registration, "forward_op", counted)
    return calls


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("way", WAYS_TORCH_TAKES_PART)
def test_the_operator_is_called_where_torch_takes_part(way, operator_calls):
    inputs = tuple(x.detach() for x in make(queries=9, dtype=torch.float32))
    WAYS_TORCH_TAKES_PART[way](lambda *x: threshold_relative_attention(*x, backend="blockwise"), inputs)
    assert operator_calls


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize(
    "options",
    [{}, {"score_bound": 9.0, "exclude_self": True}, {"dropout_p": 0.5, "dropout_seed": 3, "threshold": 0.3}],
    ids=["plain", "bound", "dropout"],
)
def test_the_direct_call_gives_the_same_bits(backend, queries, options, operator_calls):
    inputs = [x.detach() for x in make(queries=queries, keys=80, dtype=torch.float32)]
    with torch.no_grad():
        direct = threshold_relative_attention(*inputs, backend=backend, **options)
    assert not operator_calls
    through_operator = forward_op(backend, *make_problem(*inputs, options))[0]
    assert torch.equal(direct, through_operator)
    assert direct.stride() == through_operator.stride()


def test_the_direct_call_checks_values_too(operator_calls):
    q, k, v, g = (x.detach() for x in make(queries=1, keys=80, dtype=torch.float32))
    with pytest.raises(InputError, match="log_decay must be <= 0"):
        threshold_relative_attention(q, k, v, -g)
    with pytest.raises(InputError, match="log_decay must not be -inf"):
        threshold_relative_attention(q, k, v, torch.full_like(g, -torch.inf))
    assert not operator_calls


def test_available_backends_come_slowest_first():
    names = available_backends()
    assert names[:2] == ["reference", "blockwise"]
