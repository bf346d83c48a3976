"""Where the engine puts bytes."""
