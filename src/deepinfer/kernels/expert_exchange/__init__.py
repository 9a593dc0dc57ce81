"""Rows pushed into other cards' memory and returned: the device side of `parallel/symm.py`."""
