"""What leads to other programs: see README.md."""
