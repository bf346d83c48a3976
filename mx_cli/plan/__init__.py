"""From a manifest and what is wanted to the ranges that have to be read. Pure."""
