"""The only place that joins sources, cache, engine and sinks. Callable from Python."""
