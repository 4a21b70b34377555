"""What train.py and bench.py need besides the methods and common.py; a method file
needs none of it."""
