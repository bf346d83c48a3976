"""Standard library only; everything in mx may import it."""
