from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import ClassVar


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: ClassVar[list[tuple[str, Callable]]] = []

    @classmethod
    def register(cls, target: str, hook: Callable, hook_type: HookType = HookType.AFTER, *, source=None):
        assert hook_type is HookType.AROUND, "the only one that is made here"
        cls._hooks.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        for target, hook in cls._hooks:
            path, _, name = target.rpartition(".")
            module = pkgutil.resolve_name(path)
            setattr(module, name, functools.partial(hook, getattr(module, name)))
        cls._hooks.clear()
