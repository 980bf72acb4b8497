"""Stage I: schemes, losses and steps that train a supernet's weights."""
