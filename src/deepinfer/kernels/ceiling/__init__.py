"""What a chip can do at most, measured: the yardstick of the benchmarks, not an op of the model."""
