// The schedules, each a launcher of its name.
// format, consumer groups, 64-row tiles a group, tokens a tile, K blocks a stage, stages, promote, way
LAUNCHER(fp8_32, FP4_AS_FP8, 4, 1, 32, 4, 4, EACH_128)
LAUNCHER(fp8_64, FP4_AS_FP8, 2, 2, 64, 4, 4, EACH_128, OWN)
LAUNCHER(fp8_128, FP4_AS_FP8, 2, 2, 128, 2, 5, EACH_128, BOXED)
LAUNCHER(exact_few, FP4_AS_BF16, 2, 2, 32, 4, 4, NEVER, FEW)
LAUNCHER(exact_32, FP4_AS_BF16, 4, 1, 32, 4, 4, NEVER)
LAUNCHER(exact_64, FP4_AS_BF16, 2, 2, 64, 2, 5, NEVER, BOXED)
LAUNCHER(exact_136, FP4_AS_BF16, 2, 2, 136, 2, 4, NEVER, BOXED)
