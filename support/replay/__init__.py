"""The replay page: an answer, round by round, as a single HTML file."""
