"""The detector network (FSSD on a supernet) and its prior boxes."""
