"""Benchmarks: ratios of runs taken in turn against a peer or a limit of the same run."""
