"""Stands in for SGLang 0.5.23 as far as a plugin that loads weights meets it: its names and signatures, not its code."""
