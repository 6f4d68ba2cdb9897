"""What a checker has to refuse: an error in each line that says so, and in no other."""

import jax
import jax.numpy as jnp
import numpy as np

import jgrad

w = {"w": jnp.ones(3)}
x = jnp.ones(3)


def loss(w: dict[str, jax.Array]) -> jax.Array:
    return jnp.sum(w["w"])


tx = jgrad.adam(1e-3)
jgrad.adam(1e-3, beta_1=0.9)  # error
jgrad.adam(1e-3, 0.9)  # error
jgrad.muon(1e-3)  # error
jgrad.foo  # error
jgrad.unquantized  # error
jgrad.adamw(1e-3)  # error

# One of some words.
jgrad.adam(1e-3, weight_decay_rule="coupled")  # error
jgrad.adam(1e-3, bias_correction="moment")  # error
jgrad.adam(1e-3, moment_dtype="8bits")  # error
jgrad.adafactor(1e-3, rule="pytorch")  # error
jgrad.lars(1e-3, rule="papr")  # error
jgrad.lamb(1e-3, rule="papr")  # error
jgrad.muon(0.1, matrices=True, rule="normuons")  # error
jgrad.muon(0.1, matrices=True, scale="orignal")  # error
jgrad.muon(0.1, matrices=True, coefficients="jordn")  # error
jgrad.muon(0.1, matrices=True, compute_dtype="8bit")  # error
jgrad.orthogonalize(w, coefficients="jordn")  # error
jgrad.soap(1e-3, matrices=True, first_step="adams")  # error
jgrad.clip_by_global_norm(1.0, of="last")  # error
jgrad.jac(loss, mode="up")  # error
jgrad.carry_over(tx.init(w), like=tx.init(w), momentum="kept")  # error

# Numbers, and trees of them.
jgrad.adam("1e-3")  # error
jgrad.adam(1j)  # error
jgrad.adam(1e-3, beta1="x")  # error
jgrad.adam(1e-3, weight_decay=None)  # error
jgrad.clip_by_global_norm({"w": 1.0})  # error
jgrad.accumulate(tx, "4")  # error
jgrad.accumulate(tx, 4.0)  # error
jgrad.skip_spikes(tx, window=8.5)  # error
jgrad.pack(w, max_size="4096")  # error
jgrad.hyperball(tx, 0.1, leaves=True, radius="1")  # error

# Axes and choices of leaves.
jgrad.adam(1e-3, mesh_axes=3.5)  # error
jgrad.lamb(1e-3, mesh_axes=3)  # error
jgrad.lamb(1e-3, layer_axes="0")  # error
jgrad.lars_update(w, w, 0.1, layer_axes="0")  # error
jgrad.muon(0.1, matrices=True, output_axes="x")  # error
jgrad.muon(0.1, matrices=True, split="heads")  # error
jgrad.muon(0.1, matrices="w")  # error
jgrad.muon(0.1, matrices=None)  # error
jgrad.soap(0.1, matrices=np.ones(3, bool))  # error
jgrad.adam(1e-3, weight_decay=0.1, weight_decay_mask="w")  # error
jgrad.carry_over(tx.init(w), like=tx.init(w), reset="w")  # error
jgrad.hidden_matrices(exclude="norm")  # error
jgrad.by_path(["w"])  # error
jgrad.pack(w, like=3)  # error

# Transformations and their states.
jgrad.watch(5)  # error
jgrad.accumulate("adam", 4)  # error
jgrad.skip_nonfinite({"init": 1, "update": 2})  # error
jgrad.offload(jgrad.adam)  # error
jgrad.apply_gradients(w, w, w, w)  # error
tx.update(w)  # error
tx.inti(w)  # error
tx.init(w).stpe  # error
jgrad.skip_nonfinite(tx).init(w).inner.stpe  # error
jgrad.accumulate(tx, 4).init(w).weight  # error

# Functions, and what they return.
jgrad.grad(loss)(w)["b"].foo  # error
jgrad.grad(loss)(x)  # error
jgrad.grad(loss, argnums="w")  # error
jgrad.grad(loss, has_aux=True)  # error
jgrad.grad(loss, (0, 1), has_aux=True)  # error
jgrad.value_and_grad(loss, has_aux=True)  # error
jgrad.value_and_grad(loss, 1, has_aux=True)  # error
jgrad.jac(loss, has_aux=True)  # error
jgrad.value_and_jac(loss, has_aux=True)  # error
jgrad.step_in_backward(tx, loss, has_aux=True)  # error
jgrad.step_in_backward(tx, loss)(x, tx.init(w))  # error
jgrad.stop_gradient(x).foo  # error
jgrad.variable(3).foo  # error
jgrad.gradient_descent_update(x, x, 0.1).foo  # error
jgrad.hvp(loss, (x,), (x,)).foo  # error
