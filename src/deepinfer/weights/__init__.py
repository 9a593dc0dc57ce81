"""Weights: the official checkpoint described, read, loaded and written."""
