"""Damages the files of a checkpoint."""


def data_file(folder):
    """The largest file: that of the numbers."""
    return max((x for x in folder.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)


def flip_a_bit(file):
    """In the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
