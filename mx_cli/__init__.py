"""mx: model weights where they are needed, once, by the fastest path that exists, verified."""

from mx_cli.base.version import VERSION as __version__

__all__ = ["__version__"]
