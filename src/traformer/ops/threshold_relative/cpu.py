"""Backend "cpu": hands a problem to the compiled kernel (csrc/) through its C ABI. Holds no mathematics of its own."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from traformer.errors import InputError
from traformer.ops.threshold_relative import pieces
from traformer.ops.threshold_relative.dropout import drop_limit
from traformer.ops.threshold_relative.options import check_values
from traformer.ops.threshold_relative.problem import (
    Forward,
    Gradients,
    Problem,
    Saved,
    empty_forward,
    empty_gradients,
    empty_heads_last,
)
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
    "tra_interface",
    "tra_set_flush_denormals",
    "tra_forward",
    "tra_backward",
)
_INTERFACE = 2  # TRA_INTERFACE in csrc/traformer.h
_BAD_DECAY = 4
_ERRORS = {1: "not enough memory for the workspace", 2: "the problem is malformed", 3: "no such instruction set"}


_TENSOR = "P3q"  # data; strides of batch, heads and length
# TraProblem in csrc/traformer.h, packed in one go: filling a ctypes.Structure takes as long as a short decode.
_PROBLEM = struct.Struct(
    "7q"  # batch, query_heads, key_heads, queries, keys, head_size, query_start
    "4i"  # dtype, threads, needs_grad, index_block
    "4d"  # scale, threshold_value, tolerance, surrogate_width
    "QIf"  # dropout_seed, dropout_cut, dropout_scale
    f"{3 * _TENSOR}"  # q, k, v
    "6P"  # log_decay, threshold, exclude_self, key_padding, first_key, score_bound
    "3Pq"  # index_low, index_high, index_norm, index_stride
    f"{_TENSOR}3P"  # out, normaliser, reach, kept
    f"{4 * _TENSOR}2P"  # grad_out, grad_q, grad_k, grad_v, grad_log_decay, grad_threshold
)
_NO_GRADIENTS = (0,) * (4 * 4 + 2)

Described = tuple[int | float, ...]  # the fields of a TraProblem, or a run of them


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
    if (library.tra_problem_size(), library.tra_interface()) != (_PROBLEM.size, _INTERFACE):
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


def output(problem: Problem) -> Tensor:
    q = problem.q
    if q.shape[3] % CHANNEL_STEP or len(pieces.cut(problem)) > 1:
        return forward(problem).out
    out = empty_heads_last(q, q.shape[1], q.shape[2])
    _fill(problem, out, (0, 0, 0))
    return out


def _forward_piece(problem: Problem) -> Forward:
    out, *rows = result = empty_forward(problem)
    _fill(problem, out, (x.data_ptr() for x in rows))
    return result


def _fill(problem: Problem, out: Tensor, rows: Iterable[int]) -> None:
    """Run the forward into `out` and the arrays that `rows` points to, normaliser, reach and kept; 0: not wanted."""
    if problem.threshold is not None:
        check_values(problem.log_decay, problem.threshold)
    inputs, _keep_alive = _describe(problem)
    status = _run("tra_forward", (*inputs, out.data_ptr(), *out.stride()[:3], *rows, *_NO_GRADIENTS))
    if status == _BAD_DECAY:  # the kernel looks at every decay anyway, so only here
        check_values(problem.log_decay, None)


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
    inputs, keep_alive = _describe(problem)
    sums_decay = torch.empty(gradients.log_decay.shape, dtype=torch.float32)
    outputs = (
        *_strided(saved.out, keep_alive),
        _pointer(saved.normaliser, torch.float32, keep_alive),
        _pointer(saved.reach, torch.int32, keep_alive),
        0,
        *_strided(grad_out.to(problem.q.dtype), keep_alive),
        *(field for x in (gradients.q, gradients.k, gradients.v) for field in _strided(x, keep_alive)),
        sums_decay.data_ptr(),
        gradients.threshold.data_ptr() if problem.surrogate_width else 0,
    )
    _run("tra_backward", (*inputs, *outputs))
    gradients.log_decay.copy_(sums_decay)


def _with_whole_steps(problem: Problem) -> Problem:
    """The same problem with channels of zeros added, which change no score: the kernel takes multiples of 8."""
    return problem._replace(
        q=_pad_channels(problem.q),
        k=_pad_channels(problem.k),
        v=_pad_channels(problem.v),
        key_low=None if problem.key_low is None else _pad_channels(problem.key_low),
        key_high=None if problem.key_high is None else _pad_channels(problem.key_high),
    )


def _pad_channels(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % CHANNEL_STEP))


@functools.cache
def _function(name: str, forced_isa: str) -> Callable[[bytes], int]:
    """A function of the library with its first argument, the number by which it knows the instruction set."""
    library, reason = _load()
    if library is None:
        raise InputError(reason or "backend 'cpu' is not available")
    return functools.partial(getattr(library, name), list(instruction_sets()).index(instruction_set()))


def _run(name: str, described: Described) -> int:
    """0, or _BAD_DECAY; what else may go wrong is no fault of the problem's values."""
    status = _function(name, os.environ.get(ISA_VARIABLE, ""))(_PROBLEM.pack(*described))
    if status not in (0, _BAD_DECAY):
        raise RuntimeError(f"the cpu kernel failed: {_ERRORS.get(status, status)}")
    return status


def _strided(x: Tensor, keep_alive: list[Tensor]) -> tuple[int, int, int, int]:
    """Any strides on batch, heads and length are accepted; only channels must be contiguous."""
    batch, heads, rows, channels = x.stride()
    if channels != 1 and x.shape[3] > 1:
        x = x.contiguous()
        batch, heads, rows, _ = x.stride()
    keep_alive.append(x)
    return x.data_ptr(), batch, heads, rows


def _pointer(x: Tensor | None, dtype: torch.dtype, keep_alive: list[Tensor]) -> int:
    """0, the null pointer, for None."""
    if x is None:
        return 0
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


def _describe(problem: Problem) -> tuple[Described, list[Tensor]]:
    """The inputs as the kernel reads them, up to `out`, and the tensors that must outlive the call."""
    q, k, v = problem.q, problem.k, problem.v
    reason = unsupported_reason(q.dtype, q.shape[3])
    if reason is None and q.device.type != "cpu":
        reason = f"backend 'cpu' takes tensors on the CPU, not on {q.device}"
    if reason is not None:
        raise InputError(f"{reason}; use backend='blockwise'")
    if k.shape[2] > MOST_KEYS:
        raise InputError(f"backend 'cpu' takes up to 2^24 keys, not {k.shape[2]}; use backend='blockwise'")
    batch, query_heads, queries, head_size = q.shape
    keep: list[Tensor] = []
    dropout: tuple[int, int, float] = (0, 0, 0.0)
    if problem.dropout_p > 0.0 and problem.dropout_seed is not None:
        seed = int(problem.dropout_seed) & (2**64 - 1)
        dropout = (seed, drop_limit(problem.dropout_p), 1.0 / (1.0 - problem.dropout_p))
    index_block, index = 0, (0, 0, 0, 0)
    if problem.key_low is not None:
        _check_index(problem)
        bounds = (problem.key_low, problem.key_high, problem.key_norm)
        low, high, norm = (_pointer(x, torch.float32, keep) for x in bounds)
        index_block, index = INDEX_BLOCK, (low, high, norm, problem.key_low.shape[2])
    described = (
        *(batch, query_heads, k.shape[1], queries, k.shape[2], head_size, problem.query_start),
        *(_DTYPES[q.dtype], min(torch.get_num_threads(), MOST_THREADS), problem.needs_grad, index_block),
        *(problem.scale, problem.threshold_value, problem.tolerance, problem.surrogate_width),
        *dropout,
        *_strided(q, keep),
        *_strided(k, keep),
        *_strided(v, keep),
        _pointer(problem.log_decay, torch.float32, keep),
        _pointer(problem.threshold, torch.float64, keep),
        _pointer(problem.exclude_self, torch.bool, keep),
        _pointer(problem.key_padding_mask, torch.bool, keep),
        _pointer(problem.first_key, torch.int32, keep),
        _pointer(problem.score_bound, torch.float32, keep),
        *index,
    )
    return described, keep
