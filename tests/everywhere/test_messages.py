"""What the optimizers say about bad input, word for word."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.support.errors import assert_error
from tests.support.public import EXPORTED

NAN = float("nan")
W = {"layer_3": {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}}
G = jax.tree.map(lambda x: 0.5 * x, W)
Z = jax.tree.map(jnp.zeros_like, W)
X = jnp.ones(3)


def with_b(b):
    return {"layer_3": {"w": W["layer_3"]["w"], "b": b}}


def adam(w=W, g=G, lr=0.1, mw=Z, vw=Z, step=1, **kwargs):
    return jgrad.adam_update(w, g, lr, mw, vw, step, **kwargs)


FUNCTIONAL = [
    (ValueError, "adam_update: `dcdw` does not match `w` at ['layer_3']['b']: shape (3, 1), expected (3,).",
     lambda: adam(g=with_b(jnp.ones((3, 1))))),
    (ValueError, "adam_update: `dcdw` does not match `w` at ['layer_3']['b']: shape (), expected (3,).",
     lambda: adam(g=with_b(1.0))),
    (ValueError, "adam_update: `dcdw` does not match `w`: shape (2,), expected (3,).",
     lambda: adam(X, X[:2], mw=0.0, vw=0.0)),
    (ValueError, "adam_update: `mw_tm1` does not broadcast to `w` at ['layer_3']['b']: shape (3, 2), expected "
     "(3,) or one that broadcasts to it.", lambda: adam(mw=with_b(jnp.zeros((3, 2))))),
    (ValueError, "lars_update: `lr` does not broadcast to `w`: shape (2,), expected (3,) or one that broadcasts "
     "to it.", lambda: jgrad.lars_update(X, X, jnp.ones(2))),
    (ValueError, "adam_step: `vw` does not broadcast to `dcdw`: shape (2, 3), expected (3,) or one that "
     "broadcasts to it.", lambda: jgrad.adam_step(X, X, jnp.ones((2, 3)), 1)),
    (ValueError, "adam_update: `step`: shape (2,), expected one element.", lambda: adam(step=jnp.ones(2))),
    (ValueError, "adam_update: `beta1` at ['layer_3']['b']: shape (3,), expected one element.",
     lambda: adam(beta1=with_b(jnp.ones(3)) | {"layer_3": {"w": 0.9, "b": jnp.full(3, 0.9)}})),
    (ValueError, "adam_update: `dcdw` does not have the structure of `w`: only `w` has ['layer_3']['b'].",
     lambda: adam(g={"layer_3": {"w": W["layer_3"]["w"]}})),
    (ValueError, "adam_update: `w` does not have the structure of `dcdw`: only `dcdw` has ['layer_3']['c'].",
     lambda: adam(g={"layer_3": {**G["layer_3"], "c": X}})),
    (ValueError, "adam_update: `dcdw` does not have the structure of `w`: `dcdw` has a list at ['layer_3'] where "
     "`w` has a dict.", lambda: adam(g={"layer_3": [X, X]})),
    (ValueError, "adam_update: `lr` does not have the structure of `w`: only `lr` has ['layer_4']; only `w` has "
     "['layer_3'].", lambda: adam(lr={"layer_4": 0.1})),
    (TypeError, "adam_update: `w` at ['layer_3']['b']: an array of int32 and shape (3,), expected a floating "
     "dtype; cast it, or leave it out of the update.", lambda: adam(w=with_b(jnp.arange(3)))),
    (TypeError, "optimizer_update: `w`: an array of int32 and shape (), expected a floating dtype; cast it, or "
     "leave it out of the update.", lambda: jgrad.optimizer_update(3, 1.0, 0.1)),
    (TypeError, "optimizer_update: `w`: an array of int32 and shape (), expected a floating dtype; cast it, or "
     "leave it out of the update.", lambda: jgrad.optimizer_update(np.int32(3), 1.0, 0.1)),
    (TypeError, "adam_update: `dcdw` at ['layer_3']['b']: an array of bool and shape (3,), expected a floating "
     "dtype.", lambda: adam(g=with_b(X > 0))),
    (ValueError, "adam_step: `dcdw`: [[1.0], [1.0, 2.0]] of type list, expected rows of one length.",
     lambda: jgrad.adam_step([[1.0], [1.0, 2.0]], 0.0, 0.0, 1)),
    (ValueError, "adam_step: `epsilon`: -1.0, expected a number in [0, inf).",
     lambda: jgrad.adam_step(X, 0.0, 0.0, 1, epsilon=[-1.0])),
    (ValueError, "lars_update: `decay_lambda`: shape (2,), expected one element.",
     lambda: jgrad.lars_update(X, X, 0.1, decay_lambda=[0.1, 0.2])),
    (TypeError, "adam_update: `w`: an array of int32 and shape (3,), expected a floating dtype; cast it, or leave "
     "it out of the update.", lambda: adam([1, 2, 3], X, mw=0.0, vw=0.0)),
    (TypeError, "adam_update: `beta1` at ['layer_3']['b']: None, expected an array or a number.",
     lambda: adam(beta1=with_b(None) | {"layer_3": {"w": 0.9, "b": None}})),
    (ValueError, "adam_update: `lr`: 1e+39 of type float, expected a number that float32 can hold.", lambda: adam(lr=1e39)),
    (ValueError, "adam_update: `step`: 1000000000000000000000000000000000000... of type int, expected a "
     "number that float32 can hold.", lambda: adam(step=10**400)),
    (ValueError, "lamb_update: `min_trust_ratio`: 5, expected at most `max_trust_ratio`, which is 1.",
     lambda: jgrad.lamb_update(X, X, 0.1, 0.0, 0.0, 1, min_trust_ratio=5, max_trust_ratio=1)),
    (ValueError, "lars_update: `epsilon`: 0.5, expected 0 with `rule='ivy'`.",
     lambda: jgrad.lars_update(X, X, 0.1, epsilon=0.5, rule="ivy")),
    (TypeError, "gradient_descent_update: `w` at ['k']: an array of key<fry> and shape (), expected an array or a "
     "number.", lambda: jgrad.gradient_descent_update({"k": jax.random.key(0)}, {"k": 1.0}, 0.1)),
    (TypeError, "optimizer_update: `w`: an array of <U1 and shape (1,), expected an array or a number.",
     lambda: jgrad.optimizer_update(np.array(["x"]), 1.0, 0.1)),
    (TypeError, "adam_update: `w` at ['layer_3']['b']: 'abc' of type str, expected an array or a number.",
     lambda: adam(w=with_b("abc"))),
    (TypeError, "adam_update: `dcdw` at ['layer_3']['b']: True of type bool, expected an array or a number.",
     lambda: adam(g=with_b(True))),
    (TypeError, "adam_update: `dcdw` does not match `w` at ['layer_3']['b']: an array of complex64 and shape (3,), "
     "expected a real dtype to match float32.", lambda: adam(g=with_b(X.astype(jnp.complex64)))),
    (TypeError, "adam_update: `mw_tm1` does not match `w`: an array of float32 and shape (3,), expected a complex "
     "dtype to match complex64.",
     lambda: adam(X.astype(jnp.complex64), X.astype(jnp.complex64), mw=X, vw=X)),
    (TypeError, "adam_update: `vw_tm1`: an array of complex64 and shape (3,), expected a floating dtype.",
     lambda: adam(X, X, mw=X, vw=X.astype(jnp.complex64))),
    (TypeError, "adam_update: `dcdw` at ['layer_3']['b']: an array of float32 and shape (3,), expected None, as "
     "`w` is.", lambda: adam(w=with_b(None))),
    (TypeError, "adam_update: `mw_tm1` at ['layer_3']['b']: None, expected an array or a number.",
     lambda: adam(mw=with_b(None))),
    (TypeError, "adam_update: `lr` at ['layer_3']['b']: None, expected an array or a number.",
     lambda: adam(lr=None)),
    (ValueError, "adam_update: `lr`: nan, expected a number in (-inf, inf).", lambda: adam(lr=NAN)),
    (ValueError, "adam_update: `lr` at ['layer_3']: inf, expected a number in (-inf, inf).",
     lambda: adam(lr={"layer_3": float("inf")})),
    (ValueError, "adam_update: `beta1`: 1.5, expected a number in [0, 1).", lambda: adam(beta1=1.5)),
    (ValueError, "adam_update: `beta2` at ['layer_3']: 1.0, expected a number in [0, 1).",
     lambda: adam(beta2={"layer_3": 1.0})),
    (ValueError, "adam_update: `beta1`: nan, expected a number in [0, 1).", lambda: adam(beta1=NAN)),
    (TypeError, "adam_update: `beta1`: '0.9' of type str, expected a real array or a number.",
     lambda: adam(beta1="0.9")),
    (TypeError, "adam_update: `beta1`: None, expected a real array or a number.",
     lambda: adam(beta1=None)),
    (ValueError, "adam_update: `epsilon`: -1e-08, expected a number in [0, inf).", lambda: adam(epsilon=-1e-8)),
    (ValueError, "adam_update: `step`: -1, expected a number in [0, inf).", lambda: adam(step=-1)),
    (ValueError, "adam_update: `bias_correction`: 'none' of type str, expected one of 'step_size', 'moments', "
     "None.", lambda: adam(bias_correction="none")),
    (ValueError, "lars_update: `rule`: 'mlperf' of type str, expected one of 'paper', 'decayed_gradient', 'ivy'.",
     lambda: jgrad.lars_update(X, X, 0.1, rule="mlperf")),
    (ValueError, "lars_update: `decay_lambda`: -0.1, expected a number in [0, inf).",
     lambda: jgrad.lars_update(X, X, 0.1, decay_lambda=-0.1)),
    (ValueError, "lamb_update: `max_trust_ratio`: inf, expected a number in [0, inf).",
     lambda: jgrad.lamb_update(X, X, 0.1, X, X, 1, max_trust_ratio=float("inf"))),
    (NotImplementedError, "adam_update: `out` is not supported, since arrays in JAX are immutable. Use the "
     "returned value; to reuse memory, give the argument to `jax.jit(..., donate_argnums=...)`.",
     lambda: adam(out=X)),
]  # fmt: skip


def update(tx, g=G, w=W, state=None, **kwargs):
    return tx.update(g, tx.init(W) if state is None else state, w, **kwargs)


LARGE = {"layer": {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}}


def adam8(**options):
    return jgrad.adam(0.1, moment_dtype="8bit", **options)


def with_blocks(field, **parts):
    """An update whose state has other codes or scales of `w`."""
    state = adam8().init(LARGE)
    moment = getattr(state, field)["layer"]
    moment = {"layer": moment | {"w": moment["w"]._replace(**parts)}}
    return adam8().update(LARGE, state._replace(**{field: moment}), LARGE)


TRANSFORMATIONS = [
    # At construction.
    (ValueError, "lars: `epsilon`: 0.5, expected 0 with `rule='ivy'`.",
     lambda: jgrad.lars(0.1, epsilon=0.5, rule="ivy")),
    (TypeError, "adam: `moment_dtype`: 'foo', expected a real floating dtype with the range of float32, or '8bit'.",
     lambda: jgrad.adam(0.1, moment_dtype="foo")),
    *((TypeError, f"adam: `moment_dtype`: an array of {dtype} and shape (), expected a real floating dtype with the range "
       "of float32, or '8bit'.", lambda x=x: jgrad.adam(0.1, moment_dtype=x))
      for dtype, x in (("float32", jnp.float32(0.9)), ("float64", np.float64("nan")), ("float32", np.array(0.9, np.float32)))),
    (TypeError, "muon: `compute_dtype`: an array of float32 and shape (3,), expected None, or a real floating dtype such as "
     "bfloat16.", lambda: jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, compute_dtype=X)),
    # A class makes an object, and is no schedule.
    (TypeError, "adam: `learning_rate`: <class 'jax.numpy.float16'> of type _ScalarMeta, expected a real array or a number.",
     lambda: jgrad.adam(jnp.float16)),
    *((TypeError, f"{option}: <class 'int'> of type type, expected {expected}.", call) for option, expected, call in (
        ("adam: `beta1` at ['a']", "a real array or a number", lambda: jgrad.adam(0.1, beta1={"a": int})),
        ("accumulate: `every`", "an int", lambda: jgrad.accumulate(jgrad.adam(0.1), int)),
        ("average_params: `decay`", "a real array or a number", lambda: jgrad.average_params(jgrad.adam(0.1), int)),
        ("schedule_free: `learning_rate`", "a real array or a number",
         lambda: jgrad.schedule_free(jgrad.adam(0.1), learning_rate=int)),
        ("hyperball: `radius`", "a real array or a number",
         lambda: jgrad.hyperball(jgrad.adam(0.1), 0.1, leaves=True, radius=int)),
        ("muon: `matrices` at ['layer_3']['b']", "a bool",
         lambda: jgrad.muon(0.1, matrices=int, adam_learning_rate=0.1).init(W)))),
    (TypeError, "adafactor: `update` got the keyword `beta2`, expected `beta2_decay` and `beta2_cap` in `adafactor(...)`, which "
     "say how it rises.", lambda: update(jgrad.adafactor(0.1), beta2=0.9)),
    (ValueError, "adam: `learning_rate`: -1, expected a number in [0, inf).", lambda: jgrad.adam(-1)),
    (ValueError, "adam: `learning_rate`: nan, expected a number in [0, inf).", lambda: jgrad.adam(NAN)),
    (ValueError, "lamb: `learning_rate` at ['a']: -0.1, expected a number in [0, inf).",
     lambda: jgrad.lamb({"a": -0.1})),
    (TypeError, "adam: `learning_rate`: 'fast' of type str, expected a real array or a number.",
     lambda: jgrad.adam("fast")),
    (ValueError, "adam: `beta1`: 1.5, expected a number in [0, 1).", lambda: jgrad.adam(0.1, beta1=1.5)),
    (ValueError, "scale_by_adam: `beta2`: 1.0, expected a number in [0, 1).",
     lambda: jgrad.scale_by_adam(beta2=1.0)),
    (ValueError, "adam: `beta1`: an array of float32 and shape (2,), expected one number.",
     lambda: jgrad.adam(0.1, beta1=jnp.ones(2))),
    (ValueError, "adam: `weight_decay`: -0.1, expected a number in [0, inf).",
     lambda: jgrad.adam(0.1, weight_decay=-0.1)),
    *((ValueError, f"{make.__name__}: `weight_decay_rule`: 'l2' of type str, expected one of {allowed}'decoupled', "
       "'cautious', 'independent'.", lambda make=make, options=options: make(0.1, weight_decay_rule="l2", **options))
      for make, allowed, options in [
          (jgrad.adam, "", {}), (jgrad.lamb, "", {}), (jgrad.muon, "", {"matrices": True, "adam_learning_rate": 0.1}),
          (jgrad.lars, "'coupled', ", {}), (jgrad.gradient_descent, "'coupled', ", {})]),
    (ValueError, "adam: `weight_decay_rule`: None, expected one of 'decoupled', 'cautious', 'independent'.",
     lambda: jgrad.adam(0.1, weight_decay_rule=None)),
    (ValueError, "adam: `weight_decay_rule`: an array of <U8 and shape (), expected one of 'decoupled', 'cautious', 'independent'.",
     lambda: jgrad.adam(0.1, weight_decay_rule=np.array("cautious"))),
    (ValueError, "lamb: `weight_decay_rule`: 'cautious', expected 'decoupled' with `rule='ivy'`, whose weight decay acts only in the trust ratio.",
     lambda: jgrad.lamb(0.1, rule="ivy", weight_decay_rule="cautious")),
    (ValueError, "lars: `weight_decay_rule`: 'decoupled', expected 'coupled' with `rule='ivy'`, whose weight decay acts only in the trust ratio.",
     lambda: jgrad.lars(0.1, rule="ivy", weight_decay_rule="decoupled")),
    (ValueError, "adam: `weight_decay` at ['a']: 1.5, expected a number in [0, 1).",
     lambda: jgrad.adam(0.1, weight_decay={"a": 1.5}, weight_decay_rule="independent")),
    (ValueError, "muon: `adam_weight_decay`: 1.0, expected a number in [0, 1).",
     lambda: jgrad.muon(0.1, matrices=True, adam_learning_rate=0.1, adam_weight_decay=1.0, weight_decay_rule="independent")),
    (TypeError, "adam: `moment_dtype`: <class 'jax.numpy.int32'>, expected a real floating dtype with the range of float32, or '8bit'.",
     lambda: jgrad.adam(0.1, moment_dtype=jnp.int32)),
    (TypeError, "adam: `moment_dtype`: <class 'jax.numpy.float16'>, expected a real floating dtype with the range of float32, or '8bit'.",
     lambda: jgrad.adam(0.1, moment_dtype=jnp.float16)),
    (ValueError, "gradient_descent: `momentum`: -0.9, expected a number in [0, 1).",
     lambda: jgrad.gradient_descent(0.1, momentum=-0.9)),
    (ValueError, "gradient_descent: `momentum`: 1.5, expected a number in [0, 1).",
     lambda: jgrad.gradient_descent(0.1, momentum=np.array(1.5))),
    (ValueError, "lars: `momentum`: 1.0, expected a number in [0, 1).", lambda: jgrad.lars(0.1, momentum=1.0)),
    (ValueError, "gradient_descent: `nesterov`: True, expected False without `momentum`.",
     lambda: jgrad.gradient_descent(0.1, nesterov=True)),
    (ValueError, "lars: `trust_coefficient`: inf, expected a number in [0, inf).",
     lambda: jgrad.lars(0.1, trust_coefficient=float("inf"))),
    (ValueError, "lamb: `min_trust_ratio`: 2.0, expected at most `max_trust_ratio`, which is 1.0.",
     lambda: jgrad.lamb(0.1, min_trust_ratio=2.0, max_trust_ratio=1.0)),
    (ValueError, "lamb: `rule`: 'nvlamb' of type str, expected one of 'paper', 'ivy'.",
     lambda: jgrad.lamb(0.1, rule="nvlamb")),
    # At init.
    (TypeError, "adam: `params` at ['layer_3']['b']: a ShapeDtypeStruct of float32 and shape (3,), expected an array "
     "of numbers; call it under `jax.eval_shape` if you only have shapes.",
     lambda: jgrad.adam(0.1).init(with_b(jax.ShapeDtypeStruct((3,), jnp.float32)))),
    (TypeError, "adam: `params`: 'abc' of type str, expected an array of numbers; put None in the place of other leaves, as "
     "`eqx.filter(model, eqx.is_inexact_array)` does.", lambda: jgrad.adam(0.1).init("abc")),
    # At update.
    (TypeError, "adam: `params` at ['layer_3']['b']: 'abc' of type str, expected an array of numbers; put None in "
     "the place of other leaves, as `eqx.filter(model, eqx.is_inexact_array)` does.",
     lambda: update(jgrad.adam(0.1), w=with_b("abc"))),
    (TypeError, "adam: `params` at ['layer_3']['b']: an array of key<fry> and shape (), expected an array of "
     "numbers; put None in the place of other leaves, as `eqx.filter(model, eqx.is_inexact_array)` does.",
     lambda: update(jgrad.adam(0.1), w=with_b(jax.random.key(0)))),
    (TypeError, "adam: `params` at ['layer_3']['b']: True of type bool, expected an array of numbers; put None in "
     "the place of other leaves, as `eqx.filter(model, eqx.is_inexact_array)` does.", lambda: update(jgrad.adam(0.1), w=with_b(True))),
    (ValueError, "adam: `updates` does not have the structure of `params`: only `params` has ['layer_3']['b'].",
     lambda: update(jgrad.adam(0.1), g={"layer_3": {"w": W["layer_3"]["w"]}}, w=with_b("abc"))),
    (ValueError, "adam: `updates` does not match `params` at ['layer_3']['b']: shape (3, 1), expected (3,).",
     lambda: update(jgrad.adam(0.1), g=with_b(jnp.ones((3, 1))))),
    (ValueError, "adam: `updates` does not have the structure of `params`: only `params` has ['layer_3']['b'].",
     lambda: update(jgrad.adam(0.1), g={"layer_3": {"w": W["layer_3"]["w"]}})),
    (ValueError, "adam: `state.mw` does not match `params` at ['layer_3']['b']: shape (3,), expected (4,).",
     lambda: update(jgrad.adam(0.1), with_b(jnp.ones(4)), with_b(jnp.ones(4)))),
    (ValueError, "adam: `state.mw` does not have the structure of `params`: only `params` has ['layer_3'].",
     lambda: update(jgrad.adam(0.1), state=jgrad.adam(0.1).init({}))),
    (TypeError, "adam: `state.mw` at ['layer_3']['b']: None, expected an array of a real "
     "floating dtype.",
     lambda: update(jgrad.adam(0.1), state=jgrad.adam(0.1).init(with_b(None)))),
    (TypeError, "adam: `state`: TraceState, expected the OptState that this `adam` made with `init`. "
     "`carry_over` converts the states of optax.",
     lambda: update(jgrad.adam(0.1), state=optax.trace(0.9).init(W))),
    (TypeError, "adam: `state`: an OptState without `vw`, from another method or other options, expected the "
     "OptState that this `adam` made with `init`.", lambda: update(jgrad.adam(0.1), state=jgrad.lars(0.1).init(W))),
    (TypeError, "gradient_descent: `state`: an OptState with `mw`, from another method or other options, expected "
     "the OptState that this `gradient_descent` made with `init`.",
     lambda: update(jgrad.gradient_descent(0.1), state=jgrad.lars(0.1).init(W))),
    (ValueError, "lamb: the trust ratio needs the parameters: call `update(updates, state, params)`.",
     lambda: update(jgrad.lamb(0.1), w=None)),
    (ValueError, "adam: `weight_decay` needs the parameters: call `update(updates, state, params)`.",
     lambda: update(jgrad.adam(0.1, weight_decay=0.1), w=None)),
    (TypeError, "adam: `updates` at ['layer_3']['b']: an array of float32 and shape (3,), expected None, float0 or "
     "integers for a parameter of int32.",
     lambda: update(jgrad.adam(0.1), w=with_b(jnp.arange(3)))),
    (TypeError, "adam: `updates` at ['layer_3']['b']: an array of int32 and shape (3,), expected a real floating "
     "dtype for a parameter of float32.", lambda: update(jgrad.adam(0.1), g=with_b(jnp.arange(3)))),
    # Without the parameters, the state says which leaves are trained.
    *((TypeError, f"{name}: `updates` at ['layer_3']['b']: an array of {x.dtype} and shape (3,), expected a floating "
       f"dtype, since `state.{field}` has an array for it.", lambda tx=tx, x=x: update(tx, g=with_b(x), w=None, state=tx.init(W)))
      for name, tx, field in [("adam", jgrad.adam(0.1), "mw"), ("lion", jgrad.skip_nonfinite(jgrad.lion(0.1)), "mw"),
                              ("muon", jgrad.muon(0.1, matrices=jgrad.hidden_matrices(), adam_learning_rate=0.1), "mw"),
                              ("accumulate", jgrad.accumulate(jgrad.gradient_descent(0.1), 2), "total")]
      for x in (jnp.arange(3), X > 0, np.arange(3, dtype=np.int32))),
    (TypeError, "adam: `updates` at ['layer_3']['b']: an array of complex64 and shape (3,), expected a real "
     "floating dtype for a parameter of float32.",
     lambda: update(jgrad.adam(0.1), g=with_b(X.astype(jnp.complex64)))),
    (TypeError, "adam: `updates` at ['layer_3']['b']: 'abc' of type str, expected an array or None.",
     lambda: update(jgrad.adam(0.1), g=with_b("abc"))),
    (TypeError, "adam: `updates` at ['layer_3']['b']: an array of float32 and shape (3,), expected None, as the "
     "parameter is.", lambda: update(jgrad.adam(0.1), w=with_b(None))),
    (ValueError, "adam: `learning_rate` does not have the structure of `params`: only `learning_rate` has ['a']; "
     "only `params` has ['layer_3'].", lambda: update(jgrad.adam({"a": 0.1}))),
    (ValueError, "adam: `learning_rate` does not broadcast to `params` at ['layer_3']['w']: shape (3,), expected "
     "(3, 2) or one that broadcasts to it.", lambda: update(jgrad.adam(jnp.ones(3)))),
    (ValueError, "adam: `learning_rate`: -0.1, expected a number in [0, inf).",
     lambda: update(jgrad.adam(0.1), learning_rate=-0.1)),
    (ValueError, "adam: `weight_decay`: 2.0, expected a number in [0, 1).",
     lambda: update(jgrad.adam(0.1, weight_decay=0.0, weight_decay_rule="independent"), weight_decay=2.0)),
    (ValueError, "adam: `weight_decay`: an array of float32 and shape (2,), expected one number.",
     lambda: update(jgrad.adam(0.1, weight_decay=jnp.ones(2)))),
    (TypeError, "adam: `learning_rate` at ['layer_3']['b']: None, expected a value, since this leaf is updated.",
     lambda: update(jgrad.adam({"layer_3": {"w": 0.1, "b": None}}))),
    (TypeError, "adam: `weight_decay_mask` at ['layer_3']['b']: 5 of type int, expected a bool.",
     lambda: update(jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=5))),
    (TypeError, "adam: `weight_decay_mask` at ['layer_3']['b']: 5 of type int, expected a bool.",
     lambda: update(jgrad.adam(0.1, weight_decay=0.0, weight_decay_mask=5))),
    (TypeError, "adam: `weight_decay_mask` at ['layer_3']['b']: an array of bool and shape (3,), expected a bool.",
     lambda: update(jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask=np.ones(3, bool)))),
    (TypeError, "adam: `weight_decay_mask`: an array of bool and shape (), expected a tree of bools, or a function of "
     "the parameters' shapes; masks are read while tracing.",
     lambda: jax.jit(lambda x: update(jgrad.adam(0.1, weight_decay_mask=x)))(True)),
    (TypeError, "adam: `weight_decay_mask` at ['layer_3']['b']: an array of bool and shape (), traced, expected a "
     "bool; masks are read while tracing: compute them with Python or NumPy.",
     lambda: jax.jit(lambda x: update(
         jgrad.adam(0.1, weight_decay=0.1, weight_decay_mask={"layer_3": {"w": True, "b": x}})))(True)),
    (TypeError, "lamb: `trust_ratio_mask` at ['layer_3']['b']: 1 of type int, expected a bool.",
     lambda: update(jgrad.lamb(0.1, trust_ratio_mask={"layer_3": {"w": True, "b": 1}}))),
    (ValueError, "lars: `weight_decay_mask` does not have the structure of `params`: only `weight_decay_mask` has "
     "['b']; only `params` has ['layer_3'].",
     lambda: update(jgrad.lars(0.1, weight_decay=0.1, weight_decay_mask={"b": False}))),
    # Moments in 8 bits.
    (ValueError, "adam: `full_precision`: True, expected None without `moment_dtype='8bit'`.",
     lambda: jgrad.adam(0.1, full_precision=True)),
    (ValueError, "adam: `full_precision` at ['layer']['b']: True, expected the same for all leaves of a packed buffer, since "
     "they share an array; leave it unpacked.",
     lambda: adam8(full_precision={"layer": {"w": False, "b": True}}).init(jgrad.pack(LARGE))),
    (TypeError, "adam: `state.mw` at ['layer']['w']: an array of float32 and shape (64, 64), expected Blocks, 8 bits; convert "
     "it by `carry_over(state, like=jax.eval_shape(tx.init, params))`.",
     lambda: adam8().update(LARGE, jgrad.adam(0.1).init(LARGE), LARGE)),
    (TypeError, "adam: `state.mw` at ['layer']['w']: Blocks of shape (64, 64), expected an array; convert it by "
     "`carry_over(state, like=jax.eval_shape(tx.init, params))`.",
     lambda: jgrad.adam(0.1).update(LARGE, adam8().init(LARGE), LARGE)),
    (TypeError, "adam: `state.mw` at ['layer']['w']: Blocks of shape (64, 64), expected an array; convert it by "
     "`carry_over(state, like=jax.eval_shape(tx.init, params))`.",
     lambda: adam8(full_precision={"layer": {"w": True, "b": False}}).update(LARGE, adam8().init(LARGE), LARGE)),
    *((TypeError, f"adam: `state.{field}` at ['layer']['w']: an array of {dtype} and shape (64, 64) as `codes`, expected "
       f"{expected}.", lambda field=field, dtype=dtype: with_blocks(field, codes=jnp.zeros((64, 64), dtype)))
      for field, expected, others in (("mw", "int8", ("uint8", "float32")), ("vw", "uint8", ("int8", "float32")))
      for dtype in others),
    # 128 elements to a block, or 2048, or one scale for each row of 64.
    *((ValueError, f"adam: `state.vw` at ['layer']['w']: `scale` of shape {shape}, expected a number for each block of 256 "
       "elements of `codes`, of shape (64, 64).", lambda shape=shape: with_blocks("vw", scale=jnp.zeros(shape)))
      for shape in ((32,), (64, 1), (1,), ())),
]  # fmt: skip


def stopping(update, *args, **kwargs):
    return lambda x: update(*args, stop_gradients=x, **kwargs)


# Of each option that is a bool, by the function that has it.
FLAGS = {
    "gradient_descent: `nesterov`": lambda x: jgrad.gradient_descent(0.1, momentum=0.9, nesterov=x),
    "lars: `nesterov`": lambda x: jgrad.lars(0.1, momentum=0.9, nesterov=x),
    "adafactor: `scale_by_parameter`": lambda x: jgrad.adafactor(0.1, scale_by_parameter=x),
    "lars: `rate_in_momentum`": lambda x: jgrad.lars(0.1, momentum=0.9, rate_in_momentum=x),
    "scale_by_muon: `nesterov`": lambda x: jgrad.scale_by_muon(matrices=True, nesterov=x),
    "accumulate: `check_finite`": lambda x: jgrad.accumulate(jgrad.adam(0.1), 2, check_finite=x),
    "accumulate: `weighted`": lambda x: jgrad.accumulate(jgrad.adam(0.1), 2, weighted=x),
    "accumulate: `mean`": lambda x: jgrad.accumulate(jgrad.adam(0.1), 2, mean=x),
    "pack: `small_apart`": lambda x: jgrad.pack({"w": jnp.ones(3)}, small_apart=x),
    "average_params: `debias`": lambda x: jgrad.average_params(optax.identity(), 0.9, debias=x),
    "skip_spikes: `restart`": lambda x: jgrad.skip_spikes(jgrad.adam(0.1), restart=x),
    "skip_nonfinite: `branch`": lambda x: jgrad.skip_nonfinite(jgrad.adam(0.1), branch=x),
    "muon: `nesterov`": lambda x: jgrad.muon(0.1, matrices=True, adam_learning_rate=1.0, nesterov=x),
    **{f"step_in_backward: `{name}`": lambda x, name=name: jgrad.step_in_backward(jgrad.adam(0.1), jnp.sum,
     **{name: x}) for name in ("first_pass", "has_aux", "elementwise")},
    "scan_layers: `has_ys`": lambda x: jgrad.scan_layers(jnp.add, X, X, has_ys=x),
    "optimizer_of_leaf: `stays_finite`": lambda x: jgrad.optimizer_of_leaf(lambda g: g, stays_finite=x),
    "carry_over: `strict`": lambda x: jgrad.carry_over(X, like=X, strict=x),
    "grad: `has_aux`": lambda x: jgrad.grad(jnp.sum, has_aux=x),
    "value_and_grad: `has_aux`": lambda x: jgrad.value_and_grad(jnp.sum, has_aux=x),
    "jac: `has_aux`": lambda x: jgrad.jac(jnp.sin, has_aux=x),
    "value_and_jac: `has_aux`": lambda x: jgrad.value_and_jac(jnp.sin, has_aux=x),
    "stop_gradient: `preserve_type`": lambda x: jgrad.stop_gradient(X, preserve_type=x),
    "is_variable: `exclusive`": lambda x: jgrad.is_variable(X, x),
    "execute_with_gradients: `retain_grads`": lambda x: jgrad.execute_with_gradients(jnp.sum, X, retain_grads=x),
    "optimizer_update: `stop_gradients`": stopping(jgrad.optimizer_update, X, X, 0.1),
    "gradient_descent_update: `stop_gradients`": stopping(jgrad.gradient_descent_update, X, X, 0.1),
    "adam_update: `stop_gradients`": stopping(jgrad.adam_update, X, X, 0.1, X, X, 1),
    "adan_update: `stop_gradients`": stopping(jgrad.adan_update, X, X, 0.1, X, X, X, X, 1),
    "lion_update: `stop_gradients`": stopping(jgrad.lion_update, X, X, 0.1, X),
    "lars_update: `stop_gradients`": stopping(jgrad.lars_update, X, X, 0.1),
    "lamb_update: `stop_gradients`": stopping(jgrad.lamb_update, X, X, 0.1, X, X, 1),
}  # fmt: skip


def test_each_flag_is_there():
    functions = (getattr(jgrad, name) for name in EXPORTED)
    functions = [f for f in functions if callable(f) and not inspect.isclass(f)]
    flags = [
        f"{f.__name__}: `{name}`"
        for f in functions
        for name, x in inspect.signature(f).parameters.items()
        if isinstance(x.default, bool)
    ]
    assert set(flags) - {"scan_layers: `remat`"} == FLAGS.keys()


@pytest.mark.parametrize(("name", "call"), FLAGS.items(), ids=FLAGS)
def test_flags(name, call):
    """What is true in a condition is no flag: "no" is."""
    for value, came in ("no", "'no' of type str"), (1, "1 of type int"), (None, "None"):
        message = f"{name}: {came}, expected True or False."
        assert_error(TypeError, message, lambda value=value: call(value))


STATE = jgrad.adam(0.1).init({"a": X})


@pytest.mark.parametrize(
    ("error", "message", "state"),
    [
        (ValueError, "`state.step`: shape (3,), expected (); map `update` over the models, as you did `init`.",
         STATE._replace(step=jnp.zeros(3, jnp.int32))),
        (TypeError, "`state.mw` at ['a']: an array of int32 and shape (3,), expected an array of a real floating "
         "dtype.", STATE._replace(mw={"a": jnp.zeros(3, jnp.int32)})),
        (TypeError, "`state.mw` at ['a']: an array of complex64 and shape (3,), expected an array of a real "
         "floating dtype.", STATE._replace(mw={"a": jnp.zeros(3, jnp.complex64)})),
        (TypeError, "`state.vw` at ['a']: an array of complex64 and shape (3,), expected an array of a real "
         "floating dtype.", STATE._replace(vw={"a": jnp.zeros(3, jnp.complex64)})),
    ],
)  # fmt: skip
def test_state_of_another_kind(error, message, state):
    assert_error(
        error, f"adam: {message}", lambda: jgrad.adam(0.1).update({"a": X}, state, {"a": X})
    )


def test_the_switch_of_chex_turns_its_checks_off():
    """`chex.disable_asserts` is a user's own word; structures and kinds are checked all the same."""
    wide = with_b(jnp.ones((3, 1)))
    chex.disable_asserts()
    try:
        with jax.numpy_rank_promotion("allow"):
            assert jgrad.gradient_descent_update(W, wide, 0.1)["layer_3"]["b"].shape == (3, 3)
        with pytest.raises(ValueError, match="structure"):
            jgrad.gradient_descent_update(W, {}, 0.1)
    finally:
        chex.enable_asserts()


@pytest.mark.parametrize(("error", "message", "call"), FUNCTIONAL + TRANSFORMATIONS)
def test_message(error, message, call):
    assert_error(error, message, call)


def test_under_jit_the_message_is_the_same():
    call = lambda: jax.jit(lambda w, g: adam(w, g))(W, with_b(jnp.ones((3, 1))))
    assert_error(ValueError, FUNCTIONAL[0][1], call)


def test_e03_a_thousand_leaves_make_no_longer_message():
    w = {f"layer_{i}": X for i in range(1000)}
    g = {f"layer_{i}": X for i in range(1000) if i % 100 != 33}
    message = (
        "gradient_descent_update: `dcdw` does not have the structure of `w`: only `w` has ['layer_133']; only `w` "
        "has ['layer_233']; only `w` has ['layer_33'] (and 7 more)."
    )
    assert_error(ValueError, message, lambda: jgrad.gradient_descent_update(w, g, 0.1))


def test_nodes_with_other_static_data():
    """The same keys are not the same structure."""
    first, second = jax.tree_util.Partial(max, X), jax.tree_util.Partial(min, X)
    message = "optimizer_update: `effective_grad` does not have the structure of `w`: static data of nodes differ."
    assert_error(ValueError, message, lambda: jgrad.optimizer_update(first, second, 0.1))
