"""Batch jobs: rows of a JSONL file through an engine into another file, resumable after any kill.

`source` reads lines, `rows` understands them, `ledger` knows which are answered, `output` keeps the
answers, `runner` joins them with an engine. No torch.
"""
