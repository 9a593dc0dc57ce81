// The schedules, each a launcher of its name.
// format, consumer groups, 64-row tiles a group, tokens a tile, K blocks a stage, stages, promote, way
LAUNCHER(fp8_32, FP4_AS_FP8, 4, 1, 32, 4, 4, true)
LAUNCHER(fp8_64, FP4_AS_FP8, 2, 2, 64, 4, 4, true, OWN)
LAUNCHER(fp8_128, FP4_AS_FP8, 2, 2, 128, 2, 5, true, BOXED)
LAUNCHER(exact_few, FP4_AS_BF16, 2, 2, 32, 4, 4, false, FEW)
LAUNCHER(exact_32, FP4_AS_BF16, 4, 1, 32, 4, 4, false)
LAUNCHER(exact_64, FP4_AS_BF16, 2, 2, 64, 2, 5, false, BOXED)
LAUNCHER(exact_136, FP4_AS_BF16, 2, 2, 136, 2, 4, false, BOXED)
