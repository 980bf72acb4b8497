"""The detector: FSSD on a supernet, and its prior boxes."""
