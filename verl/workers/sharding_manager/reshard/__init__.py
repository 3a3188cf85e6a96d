"""Layout changes: which slices each rank holds, the plan with the fewest bytes, and its execution."""
