"""The shared cache: its tree, the election, resuming, following, eviction."""
