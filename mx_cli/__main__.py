"""The way in: `mx`, and `python -m mx_cli`."""

from __future__ import annotations

import os
import signal
from types import FrameType


def _leave(signum: int, frame: FrameType | None) -> None:
    """Nothing was begun yet: end at once, without a traceback."""
    os.write(2, f"mx: error: stopped by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


def main() -> None:
    """Run `mx`. Ends the process with the exit code of the table."""
    # Before the imports, which take longest of all until a command begins and has handlers of its own.
    from mx_cli.base.cancel import STOPPING
    from mx_cli.base.collector import look_seldom

    for signum in STOPPING:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _leave)
    look_seldom()
    from mx_cli.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
