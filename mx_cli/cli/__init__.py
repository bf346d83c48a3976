"""The command line: parses, shows, maps errors to exit codes."""
