"""Real engines take minutes to start: they run when they are asked for (`scripts/test engine`), in no other run."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("MX_TEST_ENGINE") else ["*.py"]
