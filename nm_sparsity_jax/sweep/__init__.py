"""A grid of recipes, patterns and seeds: its cells, what they left, a table and a page."""
