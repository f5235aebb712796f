"""Makes triton's interpreter fit for a test suite: it patches its language again at every call of a helper function."""

from __future__ import annotations

import inspect

from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Patch each language module once per kernel launch instead of once per call: the same result in half the time."""
    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[int]] = set()

    def patch_lang(function):
        modules = frozenset(id(value) for value in function.__globals__.values() if inspect.ismodule(value))
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch(function)

    def launch(self, *args, **kwargs):
        patched.clear()
        return run(self, *args, **kwargs)

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = launch
