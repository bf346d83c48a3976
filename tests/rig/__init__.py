"""Servers, file systems and faults that the tests run mx against. Each program here also runs by hand."""
