"""Names kept for Ivy: `execute_with_gradients`, variables, and updates in place.

May import from every folder below; nothing below imports from here.
"""
