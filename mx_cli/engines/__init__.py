"""Inference engines as ends of the bytes: each adapter turns an engine's hooks into calls of `loading` and `offering`."""
