"""Transformer: whole configurations of a transformer ranked by closed forms, the best simulated."""
