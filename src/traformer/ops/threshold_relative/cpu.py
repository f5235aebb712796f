"""Backend "cpu": hands a problem to the compiled kernel (csrc/) through its C ABI. Holds no mathematics of its own."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import replace

import torch
from torch import Tensor

from traformer.errors import InputError
from traformer.ops.threshold_relative import pieces
from traformer.ops.threshold_relative.dropout import drop_limit
from traformer.ops.threshold_relative.problem import Forward, Gradients, Problem, Saved, empty_forward, empty_gradients
from traformer.processor import LIBRARY_VARIABLE, library_path

ISA_VARIABLE = "TRAFORMER_CPU_ISA"
INDEX_BLOCK = 64  # keys per block of a key index
CHANNEL_STEP, MOST_CHANNELS = 8, 256
MOST_KEYS = 2**24  # counts are held in fp32
MOST_THREADS = 256
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FUNCTIONS = (
    "tra_isa_name",
    "tra_isa_supported",
    "tra_problem_size",
    "tra_set_flush_denormals",
    "tra_forward",
    "tra_backward",
)
_ERRORS = {1: "not enough memory for the workspace", 2: "the problem is malformed", 3: "no such instruction set"}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("stride_b", ctypes.c_int64),
        ("stride_h", ctypes.c_int64),
        ("stride_t", ctypes.c_int64),
    )


class _Problem(ctypes.Structure):  # mirrors TraProblem in csrc/traformer.h
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "query_heads", "key_heads", "queries", "keys", "head_size")),
        ("query_start", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dtype", "threads", "needs_grad", "index_block")),
        *((name, ctypes.c_double) for name in ("scale", "threshold_value", "tolerance", "surrogate_width")),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_cut", ctypes.c_uint32),
        ("dropout_scale", ctypes.c_float),
        *((name, _Tensor) for name in ("q", "k", "v")),
        *(
            (name, ctypes.c_void_p)
            for name in ("log_decay", "threshold", "exclude_self", "key_padding", "first_key", "score_bound")
        ),
        *((name, ctypes.c_void_p) for name in ("index_low", "index_high", "index_norm")),
        ("index_stride", ctypes.c_int64),
        ("out", _Tensor),
        *((name, ctypes.c_void_p) for name in ("normaliser", "reach", "kept")),
        *((name, _Tensor) for name in ("grad_out", "grad_q", "grad_k", "grad_v")),
        ("grad_log_decay", ctypes.c_void_p),
        ("grad_threshold", ctypes.c_void_p),
    )


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none. torch is imported by now, so OpenMP calls bind to the pool it already has."""
    path, forced = library_path(), os.environ.get(LIBRARY_VARIABLE)
    if not path.is_file():
        if forced:
            return None, f"{LIBRARY_VARIABLE}={forced} is not a file; give the path of a compiled kernel or unset it"
        return None, "backend 'cpu' was not compiled (no C++ compiler at install time?)"
    try:
        library = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        source = f"{LIBRARY_VARIABLE}={forced}" if forced else "backend 'cpu'"
        return None, f"{source} cannot be loaded: {error}"
    other_version = f"{path} was compiled from another version of the package; install the package again"
    if any(not hasattr(library, name) for name in _FUNCTIONS):
        return None, other_version
    library.tra_isa_name.restype = ctypes.c_char_p
    library.tra_problem_size.restype = ctypes.c_int64
    if library.tra_problem_size() != ctypes.sizeof(_Problem):
        return None, other_version
    return library, None


def instruction_sets() -> dict[str, bool]:
    """Every instruction set of this build, best first, and whether this machine has it."""
    library, _ = _load()
    if library is None:
        return {}
    found: dict[str, bool] = {}
    while (name := library.tra_isa_name(len(found))) is not None:
        found[name.decode()] = bool(library.tra_isa_supported(len(found)))
    return found


def instruction_set() -> str:
    """The one in use: the best that this machine has, or what TRAFORMER_CPU_ISA asks for."""
    name, reason = _choose(os.environ.get(ISA_VARIABLE, ""))
    if name is None:
        raise InputError(reason or "backend 'cpu' is not available")
    return name


@functools.cache
def _choose(forced: str) -> tuple[str | None, str | None]:
    sets = instruction_sets()
    usable = [name for name, supported in sets.items() if supported]
    if not sets:
        return None, _load()[1]
    if not forced:
        # "wide" is the 16-lane code on 8-lane registers: for tests only, never chosen by itself.
        return next((name for name in usable if name != "wide"), None), None
    if forced not in sets:
        return None, f"{ISA_VARIABLE}={forced} is not in this build; give one of {', '.join(usable)} or unset it"
    if not sets[forced]:
        return (
            None,
            f"{ISA_VARIABLE}={forced} asks for an instruction set that this CPU lacks; "
            f"give one of {', '.join(usable)} or unset it",
        )
    return forced, None


@functools.cache
def _position(name: str) -> int:
    """The number by which the library knows an instruction set."""
    return list(instruction_sets()).index(name)


def unavailable_reason() -> str | None:
    """None where the kernel can run, else one clause that says why not."""
    _, reason = _load()
    return reason if reason is not None else _choose(os.environ.get(ISA_VARIABLE, ""))[1]


def is_available() -> bool:
    return unavailable_reason() is None


def refuse_bad_environment() -> None:
    """An error where an environment variable asks for a kernel or instruction set that cannot be had."""
    if os.environ.get(LIBRARY_VARIABLE) or os.environ.get(ISA_VARIABLE):
        reason = unavailable_reason()
        if reason is not None:
            raise InputError(reason)


def missing_kernel_notice() -> str | None:
    """What to say, once, where the kernel would be used and is missing; None where it is there."""
    reason = unavailable_reason()
    return reason and f"{reason}; attention runs on the slower backend 'blockwise'"


@functools.cache
def note_missing_kernel() -> None:
    """Say it once per process, on stderr unless logging is set up otherwise."""
    notice = missing_kernel_notice()
    if notice is not None:
        logging.getLogger("traformer").warning(notice)


def unsupported_reason(dtype: torch.dtype, head_size: int) -> str | None:
    """None where the kernel handles such tensors, else why not."""
    if dtype not in _DTYPES:
        return f"backend 'cpu' takes float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_size > MOST_CHANNELS:
        return f"backend 'cpu' takes head sizes up to {MOST_CHANNELS}, not {head_size}"
    return None


def set_flush_denormals(flush: bool) -> bool:
    """Set whether torch's CPU threads treat denormal numbers as zero; returns whether the calling thread did before.

    Without the compiled kernel only the calling thread, and those of the pool that start later, can be reached.
    """
    library, _ = _load()
    if library is None:
        before = bool((torch.full((1,), 1e-30) * 1e-10).view(torch.int32) == 0)
        torch.set_flush_denormal(flush)
        return before
    return bool(library.tra_set_flush_denormals(int(flush), torch.get_num_threads()))


def forward(problem: Problem) -> Forward:
    if problem.q.shape[3] % CHANNEL_STEP:
        found = forward(_with_whole_steps(problem))
        return found._replace(out=empty_forward(problem).out.copy_(found.out[..., : problem.q.shape[3]]))
    runs = pieces.cut(problem)
    if len(runs) == 1:
        return _forward_piece(problem)
    result = empty_forward(problem)
    for start, stop in pieces.announced(problem, runs):
        for whole, part in zip(result, _forward_piece(problem.run_of_queries(start, stop)), strict=True):
            whole[:, :, start:stop] = part
    return result


def _forward_piece(problem: Problem) -> Forward:
    result = empty_forward(problem)
    call, keep_alive = _describe(problem)
    call.out = _strided(result.out, keep_alive)
    call.normaliser, call.reach, call.kept = (x.data_ptr() for x in (result.normaliser, result.reach, result.kept))
    _run("tra_forward", call)
    return result


def backward(problem: Problem, grad_out: Tensor, saved: Saved) -> Gradients:
    gradients = empty_gradients(problem)
    width = problem.q.shape[3]
    if width % CHANNEL_STEP:
        padded = saved._replace(out=_pad_channels(saved.out))
        found = backward(_with_whole_steps(problem), _pad_channels(grad_out), padded)
        for name in ("q", "k", "v"):
            getattr(gradients, name).copy_(getattr(found, name)[..., :width])
        return gradients._replace(log_decay=found.log_decay, threshold=found.threshold)
    # Keys collect from many rows: in fp32 whatever the storage type.
    sums_k, sums_v = (
        x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32) for x in (gradients.k, gradients.v)
    )
    sums_k.zero_()
    sums_v.zero_()
    runs = pieces.cut(problem, saved.reach)
    if len(runs) == 1:
        _backward_piece(problem, grad_out, saved, gradients._replace(k=sums_k, v=sums_v))
    else:
        for start, stop in pieces.announced(problem, runs):
            rows = slice(start, stop)
            part = empty_gradients(problem.run_of_queries(start, stop))
            part = part._replace(k=torch.zeros_like(sums_k), v=torch.zeros_like(sums_v))
            kept = Saved(*(x[:, :, rows] for x in saved))
            _backward_piece(problem.run_of_queries(start, stop), grad_out[:, :, rows], kept, part)
            sums_k += part.k
            sums_v += part.v
            gradients.q[:, :, rows] = part.q
            gradients.log_decay[:, :, rows] = part.log_decay
            if problem.surrogate_width:
                gradients.threshold[:, :, rows] = part.threshold
    for target, source in ((gradients.k, sums_k), (gradients.v, sums_v)):
        if target is not source:
            target.copy_(source)
    return gradients


def _backward_piece(problem: Problem, grad_out: Tensor, saved: Saved, gradients: Gradients) -> None:
    """Writes `gradients`, whose k and v are zeros in fp32."""
    call, keep_alive = _describe(problem)
    call.out = _strided(saved.out, keep_alive)
    call.grad_out = _strided(grad_out.to(problem.q.dtype), keep_alive)
    call.normaliser = _pointer(saved.normaliser, torch.float32, keep_alive)
    call.reach = _pointer(saved.reach, torch.int32, keep_alive)
    call.grad_q, call.grad_k, call.grad_v = (_strided(x, keep_alive) for x in (gradients.q, gradients.k, gradients.v))
    sums_decay = torch.empty(gradients.log_decay.shape, dtype=torch.float32)
    call.grad_log_decay = sums_decay.data_ptr()
    if problem.surrogate_width:
        call.grad_threshold = gradients.threshold.data_ptr()
    _run("tra_backward", call)
    gradients.log_decay.copy_(sums_decay)


def _with_whole_steps(problem: Problem) -> Problem:
    """The same problem with channels of zeros added, which change no score: the kernel takes multiples of 8."""
    return replace(
        problem,
        q=_pad_channels(problem.q),
        k=_pad_channels(problem.k),
        v=_pad_channels(problem.v),
        key_low=None if problem.key_low is None else _pad_channels(problem.key_low),
        key_high=None if problem.key_high is None else _pad_channels(problem.key_high),
    )


def _pad_channels(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % CHANNEL_STEP))


def _run(function: str, call: _Problem) -> None:
    library, reason = _load()
    if library is None:
        raise InputError(reason or "backend 'cpu' is not available")
    status = getattr(library, function)(_position(instruction_set()), ctypes.byref(call))
    if status:
        raise RuntimeError(f"the cpu kernel failed: {_ERRORS.get(status, status)}")


def _strided(x: Tensor, keep_alive: list[Tensor]) -> _Tensor:
    """Any strides on batch, heads and length are accepted; only channels must be contiguous."""
    batch, heads, rows, channels = x.stride()
    if channels != 1 and x.shape[3] > 1:
        x = x.contiguous()
        batch, heads, rows, _ = x.stride()
    keep_alive.append(x)
    return _Tensor(x.data_ptr(), batch, heads, rows)


def _pointer(x: Tensor | None, dtype: torch.dtype, keep_alive: list[Tensor]) -> int | None:
    if x is None:
        return None
    if x.dtype != dtype or not x.is_contiguous():
        x = x.to(dtype).contiguous()
    keep_alive.append(x)
    return x.data_ptr()


def _check_index(problem: Problem) -> None:
    batch, heads, _, width = problem.k.shape
    low, high, norm = problem.key_low, problem.key_high, problem.key_norm
    if low is None or high is None or norm is None:
        raise InputError("key_index must give channel bounds and norms together")
    blocks = low.shape[2]
    if (
        low.shape != (batch, heads, blocks, width)
        or high.shape != low.shape
        or norm.shape != (batch, heads, 1 + blocks)
    ):
        raise InputError(f"key_index {list(low.shape)} does not belong to keys {list(problem.k.shape)}")
    if blocks * INDEX_BLOCK < problem.query_start + problem.q.shape[2]:
        raise InputError(
            f"key_index describes at most {blocks * INDEX_BLOCK} keys, fewer than the queries may see; append the rest"
        )


def _describe(problem: Problem) -> tuple[_Problem, list[Tensor]]:
    """The problem as the kernel reads it, and the tensors that must outlive the call."""
    q, k, v = problem.q, problem.k, problem.v
    reason = unsupported_reason(q.dtype, q.shape[3])
    if reason is None and q.device.type != "cpu":
        reason = f"backend 'cpu' takes tensors on the CPU, not on {q.device}"
    if reason is not None:
        raise InputError(f"{reason}; use backend='blockwise'")
    if k.shape[2] > MOST_KEYS:
        raise InputError(f"backend 'cpu' takes up to 2^24 keys, not {k.shape[2]}; use backend='blockwise'")
    keep: list[Tensor] = []
    batch, query_heads, queries, head_size = q.shape
    call = _Problem(
        batch=batch,
        query_heads=query_heads,
        key_heads=k.shape[1],
        queries=queries,
        keys=k.shape[2],
        head_size=head_size,
        query_start=problem.query_start,
        dtype=_DTYPES[q.dtype],
        threads=min(torch.get_num_threads(), MOST_THREADS),
        needs_grad=problem.needs_grad,
        scale=problem.scale,
        threshold_value=problem.threshold_value,
        tolerance=problem.tolerance,
        surrogate_width=problem.surrogate_width,
        q=_strided(q, keep),
        k=_strided(k, keep),
        v=_strided(v, keep),
        log_decay=_pointer(problem.log_decay, torch.float32, keep),
        threshold=_pointer(problem.threshold, torch.float64, keep),
        exclude_self=_pointer(problem.exclude_self, torch.bool, keep),
        key_padding=_pointer(problem.key_padding_mask, torch.bool, keep),
        first_key=_pointer(problem.first_key, torch.int32, keep),
        score_bound=_pointer(problem.score_bound, torch.float32, keep),
    )
    if problem.dropout_p > 0.0 and problem.dropout_seed is not None:
        call.dropout_seed = int(problem.dropout_seed) & (2**64 - 1)
        call.dropout_cut = drop_limit(problem.dropout_p)
        call.dropout_scale = 1.0 / (1.0 - problem.dropout_p)
    if problem.key_low is not None:
        _check_index(problem)
        call.index_block = INDEX_BLOCK
        call.index_stride = problem.key_low.shape[2]
        call.index_low = _pointer(problem.key_low, torch.float32, keep)
        call.index_high = _pointer(problem.key_high, torch.float32, keep)
        call.index_norm = _pointer(problem.key_norm, torch.float32, keep)
    return call, keep
