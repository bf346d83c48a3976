"""Moves a plan from sources to a sink; knows only the ports."""
