"""What a block of a page needs to run, and how it runs.

A block runs alone unless it has an entry: the blocks that come before it, what the page leaves to
the reader, and a function that checks what comes out.
"""

import contextlib
import io

import jax
import jax.numpy as jnp
import optax
import pytest

import jgrad
from tests.support.pages import blocks, run_example
from tests.support.private import forced

README = "README.md"
IMPORTED = {"jax": jax, "jnp": jnp, "jgrad": jgrad, "optax": optax}
ENTRIES = {}
SLOW = set()


def after(name, index, *before, names=dict, slow=False):
    """Makes the entry of a block of a function that checks it, by all names and what was printed.

    Args:
      name: the page.
      index: of its block.
      before: indices of blocks of the page, or pages with indices.
      names: makes what the page leaves to the reader.
      slow: whether it runs with `--all` alone.
    """
    if slow:
        SLOW.add((name, index))

    def enter(check):
        earlier = [(name, x) if isinstance(x, int) else x for x in before]
        ENTRIES[name, index] = (earlier, names, check)
        return check

    return enter


def it_runs(names, printed):
    """What it does is tested elsewhere."""


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def size(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def in_both_forms(step, params, state, *args):
    """A step is the ordinary one on a CPU; in the backward pass it has the same loss and weights."""
    expected = step(*jax.tree.map(jnp.copy, (params, state)), *args)  # it donates
    with forced():
        found = jax.jit(step.__wrapped__)(params, state, *args)
    for x, y in zip(*map(jax.tree.leaves, (found[::2], expected[::2])), strict=True):
        assert jnp.allclose(x, y, rtol=2 * jnp.finfo(x.dtype).eps)  # a bfloat16 may round elsewhere
    return found


def choices(pages):
    """The blocks of some pages, as choices of a test's parameter."""
    return [_choice(name, i) for name in pages for i in range(len(blocks(name)))]


def _choice(name, index):
    marks = [pytest.mark.slow] if (name, index) in SLOW else []
    return pytest.param((name, index), marks=marks, id=f"{name.rpartition('/')[2]}-{index}")


def run(block):
    """Runs a block behind those that it needs, and checks what comes out."""
    earlier, make_names, check = ENTRIES.get(block, ([], dict, it_runs))
    name, index = (*earlier, block)[0]
    names = {} if "import jgrad\n" in blocks(name)[index] else dict(IMPORTED)
    names |= make_names()
    with jax.numpy_rank_promotion("allow"):  # a bias is added to a batch
        for other in earlier:
            run_example(*other, names)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run_example(*block, names)
        check(names, printed.getvalue())
