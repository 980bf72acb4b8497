"""Mean average precision and evaluation by route."""
