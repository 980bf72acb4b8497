"""Processes that train together: rendezvous, reductions, lost ranks."""
