"""Where past positions live: block and slot bookkeeping, byte layouts and device buffers."""
