"""Origins: one file per kind, found through the registry."""
