"""Embedding tables: where their rows are."""
