"""Structured output: what a user may ask for, its compilation, and the masks that enforce it."""
