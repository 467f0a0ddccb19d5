"""Training on what the model itself answers: rollouts, rewards, and the rows made of them."""
