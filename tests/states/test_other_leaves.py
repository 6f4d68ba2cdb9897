"""A state made for other leaves is refused by their names, whatever has it and however it is packed.

The truth is what a state is: if `init` makes another one of the other leaves, it does not fit them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import jgrad
from tests.cases import CASES, ONE_EACH
from tests.support.errors import assert_error
from tests.support.states import as_file
from tests.wrappers.test_every_wrapper import WRAPPERS

SGD = jgrad.gradient_descent(0.1)
LEAVES = {"a": jnp.ones(3), "b": jnp.ones(3), "w": jnp.ones((2, 3))}
# By the same shapes at the same places: another name; and a list, in which "2" is before "10".
MANY = {f"layer_{i}": jnp.full(3, i + 1.0) for i in range(12)}
OTHERS = {
    "a name": (LEAVES, {("aa" if k == "a" else k): x for k, x in LEAVES.items()}),
    "a list": ([MANY[f"layer_{i}"] for i in range(12)], MANY),
    "a leaf that was None": (LEAVES | {"b": None}, LEAVES),
}
CASES_OF_ONE = [x.without_masks() for x in CASES if x.name in ONE_EACH]
TRANSFORMATIONS = {x.name: x.tx() for x in CASES_OF_ONE}
TRANSFORMATIONS |= {x.name: x.around(SGD) for x in WRAPPERS}
HALF = "master_weights", "stochastic_rounding"
NOT_PACKED = [x.name for x in CASES_OF_ONE if not x.packs]
FORMS = {
    "tree": (lambda tx: tx, lambda w: w),
    "packed": (lambda tx: tx, jgrad.pack),
    "pack_small": (lambda tx: jgrad.pack_small(tx, max_size=4), lambda w: w),
}
PAIRS = [
    (name, form)
    for name in TRANSFORMATIONS
    for form in FORMS
    if (name not in NOT_PACKED or form == "tree") and (name, form) != ("offload", "pack_small")
]


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_a_state_of_other_leaves(name, form, what):
    around, packed = FORMS[form]
    tx, dtype = around(TRANSFORMATIONS[name]), jnp.bfloat16 if name in HALF else jnp.float32

    def shapes(w):
        return jax.eval_shape(lambda: packed(jax.tree.map(lambda x: x.astype(dtype), w)))

    was, now = map(shapes, OTHERS[what])
    old, new = (jax.eval_shape(tx.init, w) for w in (was, now))
    step = lambda state: jax.eval_shape(tx.update, now, state, now)
    step(new)
    if jax.tree.structure(old) == jax.tree.structure(new):
        step(old)  # numbers of all leaves
        return
    with pytest.raises((ValueError, TypeError), match="`state"):
        step(old)


# ---- what is said, and what to do ----------------------------------------------------------------

SMALL = jgrad.pack_small(jgrad.adam(0.1))
FIRST = "pack_small: `state` was made for other parameters, or with another `max_size`: "
REMEDY = "; convert it by `carry_over(state, like=jax.eval_shape(tx.init, params), rename=...)`."


@pytest.mark.parametrize("given", ["params", "updates"])
def test_names_in_pack_small(given):
    """With parameters or without. Where gradients stay, each of Adam's steps is as long as the rate."""
    was, now = OTHERS["a list"]
    _, state = SMALL.update(was, SMALL.init(was), was)
    params = now if given == "params" else None
    message = f"{FIRST}only `{given}` has 'layer_0'; only `state` has '0'{REMEDY}"
    assert_error(ValueError, message, lambda: SMALL.update(now, state, params))
    message = f"{FIRST}only `state` has '5'{REMEDY}"
    less = params and was[:5]
    assert_error(ValueError, message, lambda: SMALL.update(was[:5], state, less))
    rename = {str(i): f"layer_{i}" for i in range(12)}
    like = jax.eval_shape(SMALL.init, now)
    new, _ = jgrad.carry_over(state, like=like, rename=rename, strict=True)
    found, _ = SMALL.update(now, new, params)
    for x in found.values():
        np.testing.assert_allclose(x, -0.1, rtol=1e-5)


def test_an_order_in_pack_small():
    """The same names, of which "10" comes before "2", and not 10."""
    was, now = ({key(i): jnp.ones(3) for i in range(12)} for key in (int, str))
    message = f"{FIRST}`params` has '10' where `state` has '2'{REMEDY}"
    assert_error(ValueError, message, lambda: SMALL.update(now, SMALL.init(was), now))


def test_a_file_does_not_name_what_is_packed():
    """So the account says by which names it was read; and two that differ are an error."""
    was, now = OTHERS["a list"]
    _, state = SMALL.update(was, SMALL.init(was), was)
    file, plain = as_file(state), jgrad.adam(0.1)
    note = (
        "packed leaves of a file, which does not have their names: read by those in `like` or "
        "`params`. If they had others, restore the file with a target, and `rename` them."
    )
    like = jax.eval_shape(SMALL.init, was)
    same, account = jgrad.carry_over(file, like=like, strict=True)
    np.testing.assert_array_equal(jgrad.unpack(same).mw, jgrad.unpack(state).mw)
    assert account.notes == (note,)
    assert not jgrad.carry_over(state, like=like)[1].notes
    _, account = jgrad.carry_over(
        file, like=jax.eval_shape(plain.init, was), params=jgrad.pack(was)
    )
    assert account.notes == (note,)
    buffers = "carry_over: `old` at ['mw']: the buffers of a packed tree, "
    like, params = jax.eval_shape(SMALL.init, now), jgrad.pack(was)
    message = "for which there are several layouts, expected one; restore it with a target."
    carried = lambda **options: jgrad.carry_over(file, **options)
    assert_error(ValueError, buffers + message, lambda: carried(like=like, params=params))
    message = (
        "without their layout, expected `like` packed as it was, or `params`; or restore it with a "
        "target; matrices of Muon that jgrad 1.1 packed, `unpack` there."
    )
    like = jax.eval_shape(plain.init, was)
    assert_error(ValueError, buffers + message, lambda: carried(like=like))


def test_twelve_parts_of_a_chain_in_a_file_of_flax():
    """Dictionaries there, of which "10" is before "2": two parts that are alike keep their places."""
    clip = lambda i: jgrad.clip_by_global_norm(1.0, of="previous" if i in (2, 10) else "current")
    tx = optax.chain(*map(clip, range(12)))
    state = list(tx.init(LEAVES))
    for i in (2, 10):
        state[i] = state[i]._replace(norm=jnp.float32(i))
    file = serialization.msgpack_restore(serialization.to_bytes(tuple(state)))
    new, _ = jgrad.carry_over(file, like=jax.eval_shape(tx.init, LEAVES), strict=True)
    assert (float(new[2].norm), float(new[10].norm)) == (2, 10)
