"""Where peers find one another: one directory per kind, opened by the registry."""
