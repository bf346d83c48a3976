from __future__ import annotations

from importlib.metadata import entry_points


def load_plugins():
    """Run every plugin, and apply what they registered."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for one in entry_points(group="sglang.srt.plugins"):
        one.load()()
    HookRegistry.apply_hooks()
