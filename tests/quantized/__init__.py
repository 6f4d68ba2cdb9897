"""Codes, blocks, random bits and stochastic rounding, on plain arrays."""
