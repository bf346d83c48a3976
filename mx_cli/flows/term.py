"""Leading one term: signs of life while the work is done, and how it ended, for those who wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError, OriginChanged
from mx_cli.cache.beat import Beat, Deposed
from mx_cli.cache.fence import Fence
from mx_cli.cache.lease import Lease
from mx_cli.engine.meter import Meter
from mx_cli.flows.context import Context


@contextmanager
def leading(context: Context, lease: Lease, term: int, meter: Meter, selection: str = "") -> Iterator[Fence]:
    """While the block runs, beat for a term that was claimed; `meter` shows whether the block gets on.

    At its end the lease says how it went: a failure is told to those who want the same `selection`. Raises Deposed when
    another process leads meanwhile, and whatever the block raises.
    """
    work, stop = Stop(), context.stop
    fence = Fence(lease, term, work)
    deposed = Deposed("another process leads now")
    try:
        with (
            work.following(stop),
            Beat(lease, term, meter, context.settings.beat, lambda: work.request(deposed)),
        ):
            yield fence
    except (Deposed, OriginChanged):
        lease.leave(term)
        raise
    except MxError as error:
        if stop.requested:
            lease.leave(term)
        elif fence.superseded():
            # What fails for want of what a successor took is not worth telling.
            lease.leave(term)
            raise deposed from error
        else:
            lease.fail(term, error, selection)
        raise
    except BaseException:
        lease.leave(term)
        raise
    lease.leave(term)
