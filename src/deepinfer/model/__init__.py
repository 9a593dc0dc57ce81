"""The model: the reference that defines it and the fast path that the engine runs."""
