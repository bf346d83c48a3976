"""Modules that are made for a pull and filled in place. Each route makes them anew, so a failed one leaves nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mx_cli.base.errors import UsageError
from mx_cli.flows.parts import named_as_in, renamed
from mx_cli.flows.pull_memory import Shape, compare_tables, some, table
from mx_cli.flows.targets import Layout, filled_by_twins, layout_of, own_tensors
from mx_cli.model.holding import HOST, Holding, size_of
from mx_cli.sinks.torch_tensors import Described, describe

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Allow:
    """What need not agree: `missing` tensors stay as a new module has them, `extra` ones are left at the source."""

    missing: bool = False
    extra: bool = False


class Maker(Protocol):
    """Makes one kind of module, and knows by which names others have its tensors."""

    def make(self, dtype: str) -> Any:
        """A new module, whose weights may be anything. `dtype`: the first of the source's floats (`F32`), if nothing else says one."""

    def ignores(self, module: Any, name: str) -> bool:
        """Whether an offered tensor is one that this kind of module leaves alone."""

    def names(self, module: Any, offered: Iterable[str]) -> dict[str, str] | None:
        """The module's own names of the `offered` ones, or None where more than names differ: see `convert`."""

    def convert(self, tensors: Mapping[str, Any], dtype: str, allow: Allow) -> Any:
        """A module made of host tensors. Raises Incompatible where some are missing, or too many."""


@dataclass(frozen=True)
class _Part:
    """One module to fill. Of the `offered` names (without `prefix`) some are `ignored`; the others have `names` in it."""

    name: str
    prefix: str
    maker: Maker
    dtype: str
    offered: frozenset[str]
    ignored: frozenset[str]
    names: Mapping[str, str] | None


class NewModel:
    """Modules by name; one with the name "" stands alone. `modules` are there, and whole, once a layout has finished."""

    def __init__(self, makers: Mapping[str, Maker], allow: Allow, say: Callable[[str], None]) -> None:
        self._makers, self._allow, self._say = makers, allow, say
        self._made: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}

    def layout(self, holding: Holding) -> Layout:
        """Make the modules, and say where the holding's bytes go in them. What an earlier layout made is let go.

        Raises Incompatible naming what does not agree, UsageError for tensors without memory, NoSpace.
        """
        self._made.clear()
        self.modules.clear()
        holding = named_as_in(holding, ())
        offered = table(holding)
        parts = [self._part(name, maker, holding, offered) for name, maker in self._makers.items()]
        layouts = [self._in_place(holding, offered, parts)]
        layouts += [self._to_convert(holding, part) for part in parts if part.names is None]

        def finish() -> None:
            for one in layouts:
                one.finish()
            for module in self._made.values():
                _refuse_meta(module)
            self.modules.update({name: self._made[name] for name in self._makers})

        return dataclasses.replace(
            layouts[0],
            targets=[row for one in layouts for row in one.targets],
            names=[name for one in layouts for name in one.names],
            finish=finish,
            keep=layouts,
            own=True,
        )

    def _part(self, name: str, maker: Maker, holding: Holding, offered: Mapping[str, Shape]) -> _Part:
        prefix = f"{name}." if name else ""
        mine = [one.removeprefix(prefix) for one in offered if one.startswith(prefix)]
        dtype = _first_float(holding, prefix)
        module = self._made[name] = maker.make(dtype)
        ignored = frozenset(one for one in mine if maker.ignores(module, one))
        names = maker.names(module, [one for one in mine if one not in ignored])
        if names is None:
            del self._made[name]
        return _Part(name, prefix, maker, dtype, frozenset(mine), ignored, names)

    def _in_place(self, holding: Holding, offered: Mapping[str, Shape], parts: list[_Part]) -> Layout:
        """The layout of the tensors that go straight into modules."""
        direct = [part for part in parts if part.names is not None]
        now = {part.prefix + name: part.prefix + own for part in direct for name, own in (part.names or {}).items()}
        ignored = {part.prefix + name for part in direct for name in part.ignored}
        others = {part.prefix + name for part in parts if part.names is None for name in part.offered}
        holding = renamed(holding, lambda _, name: now.get(name, name))
        every = table(holding)
        there = {now.get(name, name): every[now.get(name, name)] for name in offered.keys() - ignored - others}
        here = [
            dataclasses.replace(one, name=part.prefix + one.name)
            for part in direct
            for one in describe(self._made[part.name], copy=False)
        ]
        twins = filled_by_twins(here, there)
        described = [_as_offered(one, there) for one in here]
        wanted: dict[str, Shape] = {one.name: (one.dtype, one.shape) for one in described if one.name not in twins}
        allow = self._allow
        names = set(compare_tables(there, wanted, allow_missing=allow.missing, allow_extra=allow.extra))
        self._report("tied to others", twins)
        self._report("not at the source: as a new model has them", wanted.keys() - names)
        self._report("left at the source", (there.keys() - names) | ignored)
        self._report(
            "of another dtype at the source", {a.name for a, b in zip(here, described, strict=True) if a is not b}
        )
        layout = layout_of(holding, [one for one in described if one.name in names])
        kinds = {one.name: one.kind for one in described}
        return dataclasses.replace(layout, names=[*layout.names, *sorted(twins)], kinds=kinds, keep=here)

    def _to_convert(self, holding: Holding, part: _Part) -> Layout:
        """Host memory for tensors that the part's maker then makes a module of."""
        tensors: dict[str, Any] = {}
        layout = own_tensors(holding, [part.prefix + name for name in part.offered], HOST, tensors)

        def finish() -> None:
            layout.finish()
            mine = {name.removeprefix(part.prefix): tensor for name, tensor in tensors.items()}
            tensors.clear()
            self._made[part.name] = part.maker.convert(mine, part.dtype, self._allow)

        return dataclasses.replace(layout, finish=finish)

    def _report(self, what: str, names: Iterable[str]) -> None:
        if found := sorted(names):
            self._say(f"{what}: {some(found)}")


def _first_float(holding: Holding, prefix: str) -> str:
    return next((t.dtype for t in holding.tensors if t.dtype in FLOATS and t.name.startswith(prefix)), "F32")


def _as_offered(one: Described, offered: Mapping[str, Shape]) -> Described:
    """The tensor, or, where the source has another float dtype, one to be copied to it: copying converts."""
    dtype, shape = offered.get(one.name, (one.dtype, one.shape))
    if dtype == one.dtype or shape != one.shape or not {dtype, one.dtype} <= FLOATS:
        return one
    return dataclasses.replace(one, dtype=dtype, address=0, size=size_of(dtype, shape), scattered=True)


def _refuse_meta(module: Any) -> None:
    """Raises UsageError naming tensors that still have no memory; buffers of no state dict are among them."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if found := [name for name, tensor in tensors if tensor.is_meta]:
        raise UsageError(f"on the device meta, without bytes: {some(found)}")
