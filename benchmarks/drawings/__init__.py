"""Drawings of the guides, as SVG whose text has the color of the page that it stands on."""
