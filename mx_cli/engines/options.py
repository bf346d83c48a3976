"""What an engine's operator wrote for mx: the keys of its loader's extra configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mx_cli.base.address import join_address, split_address
from mx_cli.base.config import FIELDS, SECRET
from mx_cli.base.errors import UsageError
from mx_cli.model.layout import STAGES

ROUTES = ("peer", "cache", "stream", "engine")
"""Where weights are taken from, in this order; `engine` is the engine's own loader."""


@dataclass(frozen=True)
class Options:
    """The wishes of one engine, the same in all of its ranks until `of_rank`.

    `uri` (with `revision`): the weights that are wanted, by default those that the engine was started with. `stage`: what
    peers exchange: `loaded` (a rank's parameters before post-processing), `processed` (after it) or `checkpoint` (files).
    `serve`: offer them to others once the engine is ready. `settings`: as in `mx config`.
    """

    uri: str = ""
    revision: str | None = None
    stage: str = "loaded"
    serve: bool = False
    routes: tuple[str, ...] = ROUTES
    peers: tuple[str, ...] = ()
    path: str = "auto"
    require: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    max_readers: int = 4
    name: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def of_rank(self, offset: int) -> Options:
        """The same for one of several ranks: port P of an address means P + `offset` for it. Port 0 stays.

        At the stage checkpoint all stay: one rank of each host speaks for it.
        """
        if not offset or self.stage == "checkpoint":
            return self
        settings = dict(self.settings)
        if settings.get("discovery"):
            settings["discovery"] = _shifted_discovery(str(settings["discovery"]), offset)
        return dataclasses.replace(
            self,
            listen=_shifted(self.listen, offset),
            advertise=_shifted(self.advertise, offset) if self.advertise else None,
            peers=tuple(_shifted(one, offset) for one in self.peers),
            name=f"{self.name}-{offset}" if self.name else None,
            settings=settings,
        )


KEYS = {one.name: one for one in dataclasses.fields(Options) if one.name != "settings"}


def options_of(given: Any) -> Options:
    """The options that a mapping of keys holds. Raises UsageError for a key or a value that means nothing."""
    if not isinstance(given, Mapping):
        raise UsageError(f"the loader's extra configuration is no mapping ({type(given).__name__})")
    known = {*KEYS, *FIELDS} - SECRET
    if unknown := sorted(str(key) for key in given if key not in known):
        raise UsageError(
            f"unknown keys in the loader's extra configuration: {', '.join(unknown)}",
            hint=f"known are {', '.join(KEYS)}, and the settings that mx config lists",
        )
    own = {key: _read(key, value) for key, value in given.items() if key in KEYS}
    settings = {key: value for key, value in given.items() if key not in KEYS}
    options = Options(**own, settings=settings)
    _check(options)
    return options


def _read(key: str, value: Any) -> Any:
    if key == "serve":
        return _of_type(key, value, bool)
    if key == "max_readers":
        return _of_type(key, value, int)
    if key in ("routes", "peers", "require"):
        return _words(key, value)
    if value is None and KEYS[key].default is None:
        return None
    return _of_type(key, value, str)


def _of_type(key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{key}: expected {kind.__name__}, got {value!r}")
    return value


def _words(key: str, value: Any) -> tuple[str, ...]:
    """A list of words, or one text with commas."""
    words: Sequence[Any] = [one.strip() for one in value.split(",")] if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
        raise UsageError(f"{key}: expected a list of words, got {value!r}")
    return tuple(words)


def _check(options: Options) -> None:
    from mx_cli.flows.data_path import Wish

    if options.stage not in STAGES:
        raise UsageError(f"stage: expected {', '.join(STAGES)}, got {options.stage!r}")
    wrong = [name for name in options.routes if name not in ROUTES]
    if wrong or not options.routes:
        raise UsageError(f"routes: expected some of {', '.join(ROUTES)}, got {', '.join(wrong) or 'none'}")
    if options.max_readers < 1:
        raise UsageError(f"max_readers: expected 1 or more, got {options.max_readers}")
    Wish(options.peers, options.path, frozenset(options.require)).check()
    split_address(options.listen, option="listen")
    if options.advertise:
        split_address(options.advertise, 0, option="advertise")


def _shifted(address: str, offset: int) -> str:
    host, port = split_address(address, 0)
    if not port:
        return address
    if port + offset > 65535:
        raise UsageError(f"no port is left for rank {offset} ({address} and {offset} more)")
    return join_address(host, port + offset)


def _shifted_discovery(text: str, offset: int) -> str:
    kind, _, rest = text.partition(":")
    if kind not in ("static", "dns"):
        return text
    return f"{kind}:" + ",".join(_shifted(part.strip(), offset) for part in rest.split(","))
