"""Readers of files: whatever a file holds, it is read, or refused in one sentence; nothing else ever comes out."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from traformer.data.cache import TokenizedText
from traformer.data.corpus import Corpus
from traformer.data.tokenizers import load_tokenizer
from traformer.errors import TraformerError
from traformer.runs.checkpoint import Checkpoint, latest_good, write_manifest
from traformer.runs.config import RunConfig
from traformer.runs.folder import RunFolder
from traformer.runs.measurements import Measurement, ResultStore

_scalar = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.integers(-(10**400), 10**400)
)
_json = st.recursive(
    _scalar, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=6
)

Damage = tuple[str, int, bytes]


def _damage() -> st.SearchStrategy[Damage]:
    """How a file's bytes change, where (modulo its size), and what is put there."""
    return st.tuples(
        st.sampled_from(["cut", "overwrite", "insert", "replace", "none"]),
        st.integers(0, 10**6),
        st.binary(max_size=12),
    )


def _apply(damage: Damage, content: bytes) -> bytes:
    kind, place, new = damage
    at = place % (len(content) + 1)
    if kind == "cut":
        return content[:at]
    if kind == "overwrite":
        return content[:at] + new + content[at + len(new) :]
    if kind == "insert":
        return content[:at] + new + content[at:]
    return new if kind == "replace" else content


def _read(action: Callable[[], Any]) -> Any:
    """What the action returns, or None where it refused in one sentence."""
    try:
        return action()
    except TraformerError as error:
        assert str(error) and "\n" not in str(error), f"not one sentence: {error}"
        return None


@functools.cache
def _workspace() -> Path:
    """One folder per process, of which each check uses its own part; removed when the process ends."""
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="traformer-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


# config.yaml ----------------------------------------------------------------------------------------------------------


@st.composite
def config_cases(draw: st.DrawFn) -> bytes:
    values: dict[Any, Any] = RunConfig(task="copy", preset="tiny").to_dict()
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=3, unique=True)):
        if draw(st.booleans()):
            values[name] = draw(_json)
        else:
            del values[name]
    if draw(st.integers(0, 5)) == 0:
        values[draw(st.text(max_size=8) | st.integers())] = draw(_json)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return _apply(draw(_damage()), text.encode("utf-8", "surrogatepass"))


def check_config(content: bytes) -> None:
    folder = _workspace() / "run"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_bytes(content)
    config = _read(lambda: RunFolder.open(folder).read_config())
    if config is not None:  # what was read can be written and is the same when it is read again
        again = RunConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict())))
        assert again == config


# metrics.jsonl --------------------------------------------------------------------------------------------------------


@st.composite
def metrics_cases(draw: st.DrawFn) -> tuple[bytes, int]:
    rows = []
    for step in range(draw(st.integers(0, 5))):
        row: Any = {"step": step * 10, "loss": 0.5, "lr": 1e-3, "clock": {"seconds": 1.0}}
        if draw(st.integers(0, 3)) == 0:
            row = draw(_json) if draw(st.booleans()) else {**row, draw(st.sampled_from(sorted(row))): draw(_json)}
        rows.append(json.dumps(row) + "\n")
    return _apply(draw(_damage()), "".join(rows).encode("utf-8", "surrogatepass")), draw(st.integers(-1, 60))


def check_metrics(case: tuple[bytes, int]) -> None:
    content, step = case
    folder = RunFolder(_workspace() / "metrics")
    folder.path.mkdir(exist_ok=True)
    folder.metrics_file.write_bytes(content)
    rows = folder.read_metrics()
    kept = folder.cut_metrics(step, warn=lambda message: None)
    assert kept == [row for row in rows if row["step"] <= step] or "NaN" in json.dumps(kept)
    assert json.dumps(folder.read_metrics()) == json.dumps(kept)


# results.json ---------------------------------------------------------------------------------------------------------

_MEASURED = Measurement(
    task="copy", split="iid", length="51-100", metric="exact_match", value=0.5, low=0.4, high=0.6, examples=100, seed=0,
    attention="tra", step=10, train_length=50,
)  # fmt: skip


@st.composite
def results_cases(draw: st.DrawFn) -> bytes:
    rows: Any = []
    for _ in range(draw(st.integers(0, 3))):
        row = _MEASURED.replace(seed=draw(st.integers(0, 3))).to_row()
        for name in draw(st.lists(st.sampled_from([*sorted(row), "at", "protocol", "loss_by_position"]), max_size=2)):
            row[name] = draw(_json)
        rows.append(row)
    if draw(st.integers(0, 9)) == 0:
        rows = draw(_json)
    return _apply(draw(_damage()), json.dumps(rows).encode("utf-8", "surrogatepass"))


def check_results(content: bytes) -> None:
    folder = _workspace() / "results"
    folder.mkdir(exist_ok=True)
    store = ResultStore(folder)
    store.file.write_bytes(content)
    found = _read(store.read)
    if found is not None:
        _read(lambda: store.put([_MEASURED]))
        again = _read(store.read)
        assert again is not None and _MEASURED in again


# checkpoints ----------------------------------------------------------------------------------------------------------

_FILES = ("model.safetensors", "state.json", "manifest.json")


@functools.cache
def _good_files() -> dict[str, bytes]:
    folder = _workspace() / "good"
    folder.mkdir()
    save_file({"weight": torch.arange(6.0)}, folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": 5}))
    write_manifest(folder, 5)
    return {name: (folder / name).read_bytes() for name in _FILES}


def checkpoint_cases() -> st.SearchStrategy[tuple[str, Damage]]:
    return st.tuples(st.sampled_from([*_FILES, "missing"]), _damage())


def check_checkpoint(case: tuple[str, Damage]) -> None:
    """A damaged checkpoint is passed over for the one before it; one that is read is read whole."""
    name, damage = case
    good = _good_files()
    folder = _workspace() / "checkpoints"
    for step in (4, 5):
        (folder / f"step-{step}").mkdir(parents=True, exist_ok=True)
        for file, content in good.items():
            (folder / f"step-{step}" / file).write_bytes(content)
    newest = folder / "step-5"
    changed = True
    if name == "missing":
        (newest / _FILES[damage[1] % 3]).unlink()
    else:
        content = _apply(damage, good[name])
        changed = content != good[name]
        (newest / name).write_bytes(content)
    said: list[str] = []
    found = latest_good(folder, warn=said.append)
    assert found is not None and all("\n" not in message for message in said)
    if found == Checkpoint(newest, 5):
        files = json.loads((newest / "manifest.json").read_text())["files"]
        assert not changed or name == "manifest.json", "a damaged checkpoint passes for whole"
        if set(files) >= {"model.safetensors", "state.json"}:
            assert torch.equal(load_file(newest / "model.safetensors")["weight"], torch.arange(6.0))
            assert found.state() == {"step": 5}
    else:
        assert changed and found.step == 4 and len(said) == 1


# token cache ----------------------------------------------------------------------------------------------------------


@functools.cache
def _good_cache() -> Path:
    text = _workspace() / "text.txt"
    text.write_text("\n".join(f"line {n} of a text" for n in range(200)))
    before = os.environ.get("TRAFORMER_CACHE")
    os.environ["TRAFORMER_CACHE"] = str(_workspace() / "cache")
    try:
        return Corpus([str(text)]).open("all", load_tokenizer("bytes"), quiet=True).folder
    finally:
        os.environ.pop("TRAFORMER_CACHE")
        if before is not None:
            os.environ["TRAFORMER_CACHE"] = before


@st.composite
def cache_cases(draw: st.DrawFn) -> tuple[str, Damage, dict[str, Any]]:
    """A file of the cache, its damage, and values put into meta.json."""
    name = draw(st.sampled_from(["meta.json", "tokens.bin", "documents.bin", "counts.bin"]))
    names = st.sampled_from(["tokens", "dtype", "files", "sources", "version"])
    changes = draw(st.dictionaries(names, _json, max_size=2)) if name == "meta.json" else {}
    return name, draw(_damage()), changes


def check_token_cache(case: tuple[str, Damage, dict[str, Any]]) -> None:
    name, damage, changes = case
    source, folder = _good_cache(), _workspace() / "tokens"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    if changes:
        meta = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps(meta))
    (folder / name).write_bytes(_apply(damage, (folder / name).read_bytes()))
    text = _read(lambda: TokenizedText(folder))
    if text is not None:
        for part in (lambda: len(text), lambda: text.tokens[:3].tolist(), lambda: text.documents.tolist(),
                     lambda: text.counts, lambda: text.split_tail(0.1)):  # fmt: skip
            _read(part)


# tokenizers -----------------------------------------------------------------------------------------------------------


@functools.cache
def _good_tokenizer() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer.to_str().encode()


@st.composite
def tokenizer_cases(draw: st.DrawFn) -> bytes:
    values = json.loads(_good_tokenizer())
    for name in draw(st.lists(st.sampled_from(sorted(values)), max_size=2, unique=True)):
        values[name] = draw(_json)
    return _apply(draw(_damage()), json.dumps(values).encode("utf-8", "surrogatepass"))


def check_tokenizer(content: bytes) -> None:
    folder = _workspace() / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(content)
    tokenizer = _read(lambda: load_tokenizer(str(folder)))
    if tokenizer is not None:
        _read(lambda: tokenizer.encode("abab"))
