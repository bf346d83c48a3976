"""A rank's weights as others may have them: held while it loads, offered once it is ready, withdrawn while they change."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import MxError
from mx_cli.base.threads import begin
from mx_cli.engines.options import Options
from mx_cli.engines.tensors import refuse_empty, refuse_hidden
from mx_cli.engines.weights import Weights
from mx_cli.flows.context import Context
from mx_cli.flows.described import Named, describe_holding
from mx_cli.flows.holdings import local_holding
from mx_cli.flows.in_process import Handle
from mx_cli.flows.serving import Offer, Serving
from mx_cli.flows.trust import accepted
from mx_cli.model import layout as model_layout
from mx_cli.model.identity import Identity
from mx_cli.sinks.torch_tensors import named_tensors
from mx_cli.transport.held import OnDisk


class Offering:
    """What one rank offers, if it is to `serve`. All methods may be called from any thread; errors are lines in the log.

    Between `hold` and the end tensors are referred to, also those that the engine itself replaces by others. They are
    hashed when they are held, and again whenever they are offered: what is no longer the same is not offered.

    Raises UsageError for an address that others can reach without a secret.
    """

    def __init__(self, options: Options, context: Context, who: str, say: Callable[[str], None]) -> None:
        self._options, self._context, self._who, self._log = options, context, who, say
        if options.serve:
            # Found out before anything is loaded.
            accepted(context, options.listen)
        self._lock = threading.RLock()
        self._tensors: dict[str, Any] = {}
        self._named: Named | None = None
        self._content = ""
        self._module: Any = None
        self._directory: Path | None = None
        self._asked = False
        self._open: Handle | Serving | None = None

    @property
    def address(self) -> str:
        """Where it is offered now; empty while it is not."""
        with self._lock:
            return self._open.address if self._open else ""

    # -- while the engine loads ----------------------------------------------------------------------------------

    def hold(self, module: Any, weights: Weights, layout: Mapping[str, Any], refusal: str = "") -> None:
        """Refer to the module's tensors, as they are now, and hash them. Blocks (0.1 s a GB)."""
        if not self._options.serve:
            return
        if refusal:
            self._log(f"{self._who}: not served: {refusal}")
            return
        try:
            refuse_empty(module)
            if self._options.stage == "processed":
                refuse_hidden(module)
            stage, shape = model_layout.layout(self._options.stage, layout)
            named = Named(None, stage, shape, weights.uri, weights.revision)
            tensors = {name: tensor for name, _, tensor in named_tensors(module)}
            content = _content(describe_holding(tensors, named, 0).holding.identities)
        except MxError as error:
            self._log(f"{self._who}: not served: {error.what}")
            return
        with self._lock:
            self._tensors, self._named, self._content = tensors, named, content
            self._module = weakref.ref(module)

    def hold_files(self, directory: Path) -> None:
        """Remember the files that the weights came from: they are offered, whatever the engine makes of them."""
        if self._options.serve:
            with self._lock:
                self._directory = directory

    # -- from then on --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Offer what is held, from a thread of its own: the engine is not held up. A withdrawal that comes first wins."""
        with self._lock:
            self._asked = True
            if self._tensors or self._directory:
                begin(threading.Thread(target=self._offer_if_asked, name="mx-offer", daemon=True))

    def offer(self) -> None:
        """Offer what is held, if it still is what it was. Blocks while it is hashed; idempotent."""
        with self._lock:
            self._asked = True
            self._offer_if_asked()

    def _offer_if_asked(self) -> None:
        with self._lock:
            if self._open or not self._asked or not (self._tensors or self._directory):
                return
            try:
                self._open = self._of_files() if self._directory else self._of_tensors()
            except MxError as error:
                self._log(f"{self._who}: not served: {error.what}")

    def withdraw(self, why: str) -> None:
        """Nobody reads when this returns, and no memory is registered. Blocks for a moment; files stay offered."""
        with self._lock:
            if self._directory:
                return
            self._asked = False
            if self._open:
                self._close()
                self._log(f"{self._who}: no longer served: {why}")

    def drop(self, why: str) -> None:
        """The same for good: nothing refers to the tensors any more."""
        with self._lock:
            self.withdraw(why)
            self._tensors, self._named = {}, None

    def close(self) -> None:
        """End everything. Idempotent."""
        with self._lock:
            self._asked = False
            self._close()
            self._tensors, self._named, self._directory = {}, None, None

    def _close(self) -> None:
        if self._open:
            self._open.close()
            self._open = None

    def _of_tensors(self) -> Handle | None:
        assert self._named is not None, "tensors are held with their name"
        handle = Handle(self._tensors, self._context, self._as_offered(), self._named, False, publish=False)
        if handle.identities["content"] != self._content:
            handle.close()
            self.drop("")
            self._log(f"{self._who}: not served: the weights have changed since they were loaded")
            return None
        try:
            handle.publish()
        except BaseException:
            handle.close()
            raise
        beside = self._beside()
        kept = f"; {units.size(beside)} of them are kept for readers only" if beside else ""
        self._log(f"{self._who}: serves stage {self._named.stage} at {handle.address}{kept}")
        return handle

    def _of_files(self) -> Serving:
        assert self._directory is not None, "there are files"
        holding = local_holding(self._directory, self._context)
        serving = Serving(self._context, self._as_offered())
        try:
            serving.offer(holding, OnDisk(self._directory, holding))
        except BaseException:
            serving.close()
            raise
        self._log(f"{self._who}: serves the files of {self._directory} at {serving.address}")
        return serving

    def _as_offered(self) -> Offer:
        options = self._options
        return Offer(options.listen, options.advertise, options.max_readers, options.name)

    def _beside(self) -> int:
        """Bytes that are held, and that the engine has replaced by others."""
        module = self._module()
        if module is None:
            return 0
        used = {tensor.untyped_storage().data_ptr() for _, _, tensor in named_tensors(module, all_buffers=True)}
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors.values()}
        return sum(storage.nbytes() for address, storage in storages.items() if address not in used)


def _content(identities: Iterable[Identity]) -> str:
    return next(one.id for one in identities if one.kind == "content")
