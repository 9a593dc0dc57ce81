// The schedules, each a launcher of its name.
// format, consumer groups, 64-row tiles a group, tokens a tile, K blocks a stage, stages, promote,
// dense, blocks a multiprocessor, way, flow
LAUNCHER(fp8_32, FP4_AS_FP8, 4, 1, 32, 4, 4, true)
LAUNCHER(fp8_64, FP4_AS_FP8, 2, 2, 64, 4, 4, true, false, 1, OWN)
LAUNCHER(fp8_128, FP4_AS_FP8, 2, 2, 128, 2, 5, true)
LAUNCHER(exact_32, FP4_AS_BF16, 4, 1, 32, 4, 4, false)
LAUNCHER(exact_64, FP4_AS_BF16, 2, 2, 64, 2, 5, false, false, 1, OWN)
LAUNCHER(exact_144, FP4_AS_BF16, 2, 2, 144, 1, 7, false, false, 1, OWN)
// the same, dense; blocks a multiprocessor
LAUNCHER(dense_32, FP8_AS_BF16, 2, 1, 32, 1, 8, false, true, 2)
LAUNCHER(dense_96, FP8_AS_BF16, 2, 2, 96, 1, 6, false, true)
LAUNCHER(dense_128, FP8_AS_BF16, 2, 2, 128, 1, 6, false, true)
