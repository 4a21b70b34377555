"""What only bench.py and the commands built on it need."""
