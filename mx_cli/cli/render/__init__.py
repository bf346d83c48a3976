"""How events and results look: for people, for logs, as JSON lines."""
