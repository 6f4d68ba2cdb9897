"""Where arrays lie: on the device, or in host memory."""

import jax

from tests.support.private import forms, host_memory, inner_equations


def kinds(tree):
    """The memory of each array of a tree."""
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.size]


def on_host(tree):
    """The tree with all but its scalars in host memory, by JAX's own words."""
    return jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim and x.size else x, tree
    )


def on_device(tree):
    """The tree in device memory."""
    return jax.device_put(tree, jax.memory.Space.Device)


def offloaded(state):
    """The state as `offload` begins it: what is large in host memory, codes in words."""
    state = forms.to_words(state)
    return host_memory.to_host(state, forms.belong_on_host(state, host_memory.is_large))


def largest_on_device(program):
    """How many elements the largest array has that a jaxpr makes in device memory."""
    made = (x.aval for eqn in inner_equations(program.eqns) for x in eqn.outvars)
    return max(x.size for x in made if x.memory_space == jax.memory.Space.Device)
