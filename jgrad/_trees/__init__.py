"""Trees side by side, and checks that name the argument and the leaf.

Imports nothing of jgrad.
"""
