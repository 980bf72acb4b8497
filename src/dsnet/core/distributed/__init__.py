"""Several processes that train one network: rendezvous, reductions, lost ranks."""
