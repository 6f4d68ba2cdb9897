"""The rows of docs/from_elsewhere.md: our line makes the numbers that PyTorch made of theirs.

`tests/pages/torch_numbers.py` says how PyTorch's were made.
"""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.pages import torch_numbers
from tests.support.pages import run_example

ROWS = dict(torch_numbers.table())
TORCH = json.loads(torch_numbers.DATA.read_text())
PAGE = "docs/from_elsewhere.md"


def numbers(*trees):
    return np.concatenate([np.ravel(x) for tree in trees for x in (tree["w"], tree["b"])])


def problem():
    return jax.tree.map(jnp.asarray, torch_numbers.problem())


def steps_of(tx, w, grads, state=None, *, scaled=False):
    """Weights, or their average, after each gradient; with `scaled` the scale, too."""
    state, found, update = tx.init(w) if state is None else state, [], jax.jit(tx.update)
    for i, g in enumerate(grads):
        if scaled:
            scale = jnp.float64(jnp.inf if i == 2 else 1) * state.loss_scale.astype(float)
            g = jax.tree.map(lambda x, scale=scale: x * scale, g)
        updates, state = update(g, state, w)
        w = optax.apply_updates(w, updates)
        average = optax.tree.get(state, "average")
        row = numbers(w if average is None else average)
        found.append([*row, float(state.loss_scale)] if scaled else row)
    return found


def test_the_file_has_the_rows_of_the_page():
    assert list(TORCH) == [*ROWS, torch_numbers.DAMPENED]
    assert len(ROWS) == 15


@pytest.mark.slow(one_in=6)
@pytest.mark.parametrize("line", ROWS)
def test_same_numbers(line, x64, standard_promotion):
    names = {"jgrad": jgrad, "optax": optax, "jnp": jnp, "sgd": jgrad.gradient_descent(0.1)}
    scaled = "GradScaler" in line
    found = steps_of(eval(ROWS[line], names), *problem(), scaled=scaled)
    expected = [row[: 10 if scaled else 9] for row in TORCH[line]]
    # Where PyTorch adds 1e-6 to a norm above 1.
    rtol = 1e-6 if "clip_grad_norm_" in line else 1e-11
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-12)


def test_dampening(x64):
    """The rate times 1 - d, and the first gradient divided by it."""
    w, grads = problem()
    grads[0] = jax.tree.map(lambda g: g / 0.5, grads[0])
    found = steps_of(jgrad.gradient_descent(0.1 * 0.5, momentum=0.9), w, grads)
    np.testing.assert_allclose(found, TORCH[torch_numbers.DAMPENED], rtol=1e-11, atol=1e-12)


class Tensor:
    """What the page calls of a tensor of PyTorch."""

    def __init__(self, values, shape):
        self.values = np.reshape(values, shape)

    def detach(self):
        return self

    def numpy(self):
        return self.values


def test_a_state_of_pytorch(x64):
    """The page's lines make a state with which training goes on."""
    line = "torch.optim.Adam(params, lr=0.01)"
    w, b, mw, mb, vw, vb = np.split(TORCH[line][2], np.cumsum([6, 3, 6, 3, 6]))

    named = {"w": Tensor(w, (2, 3)), "b": Tensor(b, 3)}
    moments = {
        named["w"]: {"exp_avg": Tensor(mw, (2, 3)), "exp_avg_sq": Tensor(vw, (2, 3))},
        named["b"]: {"exp_avg": Tensor(mb, 3), "exp_avg_sq": Tensor(vb, 3)},
    }
    model = types.SimpleNamespace(named_parameters=named.items)
    adam = types.SimpleNamespace(state=moments)
    names = {"jnp": jnp, "jgrad": jgrad, "model": model, "adam": adam, "steps": 3}
    names = run_example(PAGE, 1, names)
    tx, grads = eval(ROWS[line], names), problem()[1]
    found = steps_of(tx, names["params"], grads[3:], names["state"])
    np.testing.assert_allclose(found, [row[:9] for row in TORCH[line][3:]], rtol=1e-9)


@pytest.mark.slow
def test_kernels_of_pytorch():
    """(out, in): the scale is that of 16 outputs, sqrt(max(1, 16 / 48))."""
    names = run_example(PAGE, 0, {"jgrad": jgrad, "jnp": jnp})
    w = names["params"]
    updates, _ = jax.jit(names["tx"].update)(w, names["tx"].init(w), w)
    other = jgrad.muon(0.02, matrices=True, weight_decay=0.1, adam_learning_rate=3e-4)
    turned = {"w": w["w"].T}
    transposed, _ = jax.jit(other.update)(turned, other.init(turned), turned)
    np.testing.assert_allclose(updates["w"], transposed["w"].T, rtol=1e-5)
