"""Measuring speed: figures as JSONL, and tables of them."""
