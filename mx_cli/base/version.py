"""The version of mx, in this one place."""

VERSION = "0.1.0"
