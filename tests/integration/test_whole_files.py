"""Files of a listing into a directory of this process's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from mx_cli.engine.many import Bell
from mx_cli.engine.ports import Source
from mx_cli.engine.run import Limits
from mx_cli.engine.threads import Lifted
from mx_cli.flows.from_python import process_context
from mx_cli.flows.whole_files import WholeFiles
from mx_cli.model.manifest import Entry
from tests.rig.checkpoints import noise
from tests.rig.memory import MemoryReader

SIZE = 2 << 20
RIGHT = noise("right", SIZE)
WRONG = RIGHT[:-1] + bytes([RIGHT[-1] ^ 1])


def test_a_second_try_needs_no_second_room(tmpfs: Callable[..., Path], tmp_path: Path) -> None:
    """What was wrong lies where what is right goes."""
    entry = Entry("model.bin", SIZE, digests={"sha256": hashlib.sha256(RIGHT).hexdigest()}, key="model.bin")
    context = process_context({"cache_dir": str(tmp_path / "cache")})
    place = tmpfs("3m")
    files = WholeFiles([entry], [], place, context)
    given = [WRONG, RIGHT]

    def open_source() -> Source:
        return Lifted(MemoryReader({"model.bin": given.pop(0)}), None, Bell().ring)

    files.fetch(open_source, lambda source: Limits(1.0, 10.0, 1, 1), tries=2)
    assert (place / "model.bin").read_bytes() == RIGHT
    assert given == []
