"""What pages, examples and other people's programs say, and what stands around the library."""
