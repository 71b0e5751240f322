"""Triton's interpreter without work that has no effect; imported where it interprets.

It does two things at each operation or call of a function that take half of its time. It computes
whether an integer overflows, and drops the result unless it debugs. And it looks through
`triton.language` for functions to replace, which are the same ones each time.
"""

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter

interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


@functools.cache
def _builtins(package):
    """Their names; first asked for before any is replaced."""
    return [name for name, each in inspect.getmembers(package) if tl.core.is_builtin(each)]


def _patch_builtin(package, builder, scope):
    for name in _builtins(package):
        if tl.core.is_builtin(member := getattr(package, name)):
            interpreter._patch_attr(package, name, member, builder, scope)


interpreter._patch_builtin = _patch_builtin
