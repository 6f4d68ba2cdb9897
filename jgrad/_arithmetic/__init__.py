"""Arithmetic on the arrays of one leaf, and running it over many leaves.

No trees, no checks, no state. Imports nothing of jgrad.
"""
