"""Where training batches come from: schedules of generation (synchronous, over-sampling) and filters around them."""
