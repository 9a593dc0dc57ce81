"""Engines of several processes: starting them, stepping together, noticing who is gone."""
