"""What the methods, train.py and bench.py need besides; see README.md."""
