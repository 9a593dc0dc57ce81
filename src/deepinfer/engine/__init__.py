"""The engine: requests in, steps planned, run and applied, completions out."""
