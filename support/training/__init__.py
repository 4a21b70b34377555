"""What only train.py needs."""
