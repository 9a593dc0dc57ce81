// The schedules of routed experts, each a launcher of its name.
// format, consumer groups, 64-row tiles a group, tokens a tile, K blocks a stage, stages, promote, way,
// ahead
LAUNCHER(fp8_48_experts, FP4_AS_FP8, 4, 1, 48, 4, 4, true, BOXED)
LAUNCHER(fp8_128_experts, FP4_AS_FP8, 2, 2, 128, 2, 5, true, BOXED)
LAUNCHER(fp8_64_four, FP4_AS_FP8, 4, 1, 64, 4, 4, true, BOXED)
LAUNCHER(exact_few_experts, FP4_AS_BF16, 2, 2, 32, 4, 4, false, FEW_BOXED)
LAUNCHER(exact_136_experts, FP4_AS_BF16, 2, 2, 136, 2, 4, false, BOXED)
LAUNCHER(exact_48_ahead, FP4_AS_BF16, 4, 1, 48, 2, 6, false, BOXED, true)
LAUNCHER(exact_64_four, FP4_AS_BF16, 4, 1, 64, 2, 6, false, BOXED, true)
