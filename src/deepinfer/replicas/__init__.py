"""Whole engines as processes: a rank of ours, and replicas on Ray."""
