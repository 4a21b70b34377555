"""Drafters to compare with; each keeps the contract of a method file."""
