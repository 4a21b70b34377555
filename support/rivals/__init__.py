"""Drafters to compare with that are no paper's method here; they have a method file's contract."""
