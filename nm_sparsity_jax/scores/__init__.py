"""Scores of GLUE: rows beside the published ones, and the official submission."""
