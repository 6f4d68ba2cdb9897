"""Trees of different depth, and checks that name the argument and the leaf.

Imports nothing of jgrad.
"""
