// The dense schedules, each a launcher of its name: consumer groups, 64-row tiles a group, tokens a
// tile, K blocks a stage, stages, blocks a processor, steps decoded ahead.
DENSE(few_64, 1, 1, 32, 2, 4, 3, 4)
DENSE(few_128, 2, 1, 32, 2, 4, 2, 4)
DENSE(some_128, 2, 1, 64, 1, 5, 2, 4)
DENSE(half_128, 2, 1, 96, 1, 4, 2, 2)
DENSE(step_128, 2, 1, 128, 1, 8, 1, 4)
DENSE(step_192, 3, 1, 128, 1, 7, 1, 4)
DENSE(wide_128, 2, 1, 192, 1, 6, 1, 4)
DENSE(wide_192, 3, 1, 192, 1, 5, 1, 2)
DENSE(whole_128, 2, 1, 128, 1, 8, 1, 4, true)
DENSE(whole_wide, 2, 1, 192, 1, 6, 1, 2, true)
// For at most eight tokens: warps, stages of each, blocks a processor.
SLIM(slim_8, 8, 4, 1)
SLIM(slim_4, 4, 4, 2)
