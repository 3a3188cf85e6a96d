"""The PPO-family trainer: one loop for every advantage estimator, policy loss and execution mode."""
