"""The tests of mx. README.md says how to use the fixtures."""
