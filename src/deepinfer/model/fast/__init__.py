"""The text model on paged caches and dispatched ops: the same code on every device."""
