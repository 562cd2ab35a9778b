"""Rows: which owner has which, the storage of an owner, and the parameter that the model sees."""
