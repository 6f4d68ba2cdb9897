"""Muon, and what is needed for it alone: where matrices are, and their orthogonalization.

Nothing outside of this folder knows of matrices but `pack`, which keeps their rows together.
"""
