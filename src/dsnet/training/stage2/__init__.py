"""Stage II: gates learn to route while the weights stay frozen."""
