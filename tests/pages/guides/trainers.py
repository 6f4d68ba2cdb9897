"""Small copies of what public trainers do around an optimizer, for the blocks of docs/trainers.md.

Each function returns the names that the page's block finds in its file, and under "theirs" the
optimizer that the block replaces. Signatures, names of options and the order of calls are those of
the file at the commit in the docstring; models and data are small. `FILES` has all names that a
block may read: what the file imports, and what is in scope where the block stands.
"""

import abc
import dataclasses
import enum
import functools
import operator
import re
import types
from typing import ClassVar

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

STEPS = 12
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 3, STEPS)
X = np.random.default_rng(0).normal(size=(STEPS, 16, 8)).astype(np.float32)
Y = np.sin(X[..., :4]) + 0.1


def dense(width=8):
    """A model as a dict, whose gradients have norms above 1 at first: of all, and of the head."""
    keys = jax.random.split(jax.random.key(0), 2)
    backbone = {"kernel": 0.3 * jax.random.normal(keys[0], (8, width)), "scale": jnp.ones(width)}
    return {"backbone": backbone, "head": {"kernel": jax.random.normal(keys[1], (width, 4))}}


def mean_square(params, x, y):
    hidden = jnp.tanh(x @ params["backbone"]["kernel"]) * params["backbone"]["scale"]
    return jnp.mean(jnp.square(hidden @ params["head"]["kernel"] - y))


# ---- MaxText -----------------------------------------------------------------------------------


def maxtext():
    """AI-Hypercomputer/maxtext e591f30: `optimizers.py`, and `train_step` of `train.py`."""

    def _get_path_mask_fn(patterns, match_returns_true=True):
        if not patterns:
            return None

        def found(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return any(re.search(x, name) for x in patterns) is match_returns_true

        return lambda params: jax.tree_util.tree_map_with_path(found, params)

    def get_adamw_mask(config):
        return _get_path_mask_fn(config.adamw_mask, match_returns_true=False)

    def theirs(config, learning_rate_schedule):
        return optax.adamw(
            learning_rate_schedule,
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            eps_root=config.adam_eps_root,
            weight_decay=config.adam_weight_decay,
            mu_dtype=config.mu_dtype,
            mask=get_adamw_mask(config),
        )

    def get_optimizer(base_opt, skip_step_on_spikes, config):
        """What is around the chosen method."""
        if config.skip_step_on_spikes:
            base_opt = skip_step_on_spikes(
                base_opt,
                interval=config.skip_step_interval,
                scaling_factor=config.skip_step_scaling_factor,
            )
        frozen = _get_path_mask_fn(config.trainable_parameters_mask, match_returns_true=False)
        if frozen is None:
            return base_opt
        labels = lambda w: jax.tree.map(lambda x: "frozen" if x else "trainable", frozen(w))
        return optax.multi_transform({"trainable": base_opt, "frozen": optax.set_to_zero()}, labels)

    def train(tx, config, params, nan=None):
        """Losses, the metric, and the last state; the loss of step `nan` is not a number."""

        @jax.jit
        def train_step(params, opt_state, x, y):
            loss, grads = jax.value_and_grad(mean_square)(params, x, y)
            if config.gradient_clipping_threshold > 0:
                clip = optax.clip_by_global_norm(config.gradient_clipping_threshold)
                grads, _ = clip.update(grads, None, None)
            extra = {}
            if config.skip_step_on_spikes:
                extra = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
            updates, opt_state = tx.update(grads, opt_state, params, **extra)
            is_skipped = opt_state.get("is_skipped") if isinstance(opt_state, dict) else None
            return optax.apply_updates(params, updates), opt_state, loss, is_skipped

        opt_state, losses, metric = tx.init(params), [], []
        scales = np.resize(np.float32([1, 0.1, 0.3]), (STEPS, 1, 1))  # some gradients are clipped
        for i, (x, y) in enumerate(zip(scales * X, Y, strict=True)):
            y = y * (np.nan if i == nan else 1)
            params, opt_state, loss, is_skipped = train_step(params, opt_state, x, y)
            losses.append(float(loss))
            metric.append(is_skipped)
        return losses, metric, opt_state

    config = types.SimpleNamespace(
        adam_b1=0.9,
        adam_b2=0.95,
        adam_eps=1e-8,
        adam_eps_root=0.0,
        adam_weight_decay=0.1,
        adamw_mask=["scale"],
        mu_dtype=jnp.dtype("float32"),
        skip_step_on_spikes=False,
        skip_step_interval=4,
        skip_step_scaling_factor=6.0,
        trainable_parameters_mask=[],
        gradient_clipping_threshold=1.0,
    )
    return {
        "config": config,
        "learning_rate_schedule": SCHEDULE,
        "get_adamw_mask": get_adamw_mask,
        "get_optimizer": get_optimizer,
        "theirs": theirs,
        "train": train,
    }


# ---- Tunix -------------------------------------------------------------------------------------


class Regression(nnx.Module):
    def __init__(self, dtype=jnp.float32, width=64):
        layer = functools.partial(nnx.Linear, rngs=nnx.Rngs(0), param_dtype=dtype)
        self.a, self.b = layer(8, width), layer(width, 4)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def tunix():
    """google/tunix c7d8950: `PeftTrainer` of `sft/peft_trainer.py`, with its path of one update."""

    class PeftTrainer:
        def __init__(self, model, optimizer, training_config):
            self.model, self.config = model, training_config
            self.optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        def train_step(self, x, y):
            return float(step(self.model, self.optimizer, x, y, self.config.restore))

        def learning_rate(self):
            return float(self.optimizer.opt_state.hyperparams["learning_rate"][...])

    @functools.partial(nnx.jit, static_argnums=4)
    def step(model, optimizer, x, y, restore):
        """`restore` is its `_restore_opt_state_float_dtypes`, without which `nnx.cond` raises."""
        loss = lambda model: jnp.mean(jnp.square(model(x).astype(jnp.float32) - y))
        value, grads = nnx.value_and_grad(loss)(model)

        def apply_updates(model, optimizer):
            state = lambda: nnx.state(optimizer, nnx.optimizer.OptState)
            dtypes = jax.tree.map(lambda x: x.dtype, nnx.to_pure_dict(state()))
            optimizer.update(model, grads)
            if restore:
                after = state()
                found = jax.tree.map(jnp.astype, nnx.to_pure_dict(after), dtypes)
                nnx.replace_by_pure_dict(after, found)
                nnx.update(optimizer, after)

        nnx.cond(True, apply_updates, lambda model, optimizer: None, model, optimizer)
        return value

    def train(trainer):
        losses = [trainer.train_step(x, y) for x, y in zip(X, Y, strict=True)]
        return losses, trainer

    rates = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)
    return {
        "PeftTrainer": PeftTrainer,
        "Regression": Regression,
        "model": Regression(),
        "schedule": SCHEDULE,
        "training_config": types.SimpleNamespace(restore=False),
        "theirs": rates(learning_rate=SCHEDULE, weight_decay=0.0),
        "train": train,
    }


# ---- Levanter ----------------------------------------------------------------------------------


class NamedArray(eqx.Module):
    """As haliax has it: an array, and names of its axes."""

    array: jax.Array
    axes: tuple = eqx.field(static=True)


class Layer(eqx.Module):
    weight: NamedArray
    bias: NamedArray


def levanter():
    """stanford-crfm/levanter 9263f81, marin-community/marin 0f45aa1: `optim/config.py`, and `take_train_step`."""

    class OptimizerConfig(abc.ABC):
        learning_rate: float = 6e-4
        weight_decay: float = 0.1
        choices: ClassVar = {}

        @classmethod
        def register_subclass(cls, name):
            return lambda chosen: cls.choices.setdefault(name, chosen)

        @abc.abstractmethod
        def build(self, num_train_steps):
            """An optax transformation."""

        def lr_scheduler(self, num_train_steps):
            return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, num_train_steps)

        def build_weight_decay_mask(self):
            """One bool for each named array, and none for what is no array."""
            named = lambda x: isinstance(x, NamedArray)
            decays = lambda path, x: not jax.tree_util.keystr(path).endswith("bias")
            return lambda w: jax.tree_util.tree_map_with_path(decays, w, is_leaf=named)

    class AdamConfig(OptimizerConfig):
        def build(self, num_train_steps):
            def _optimizer(learning_rate):
                decay = optax.add_decayed_weights(0.1, self.build_weight_decay_mask())
                return optax.chain(
                    optax.clip_by_global_norm(1.0),
                    optax.scale_by_adam(0.9, 0.95, 1e-8),
                    decay,
                    optax.scale(-learning_rate),
                )

            return optax.inject_hyperparams(_optimizer)(self.lr_scheduler(num_train_steps))

    def layer(n, m, seed):
        w = jax.random.normal(jax.random.key(seed), (n, m)) / 3
        return Layer(NamedArray(w, ("in", "out")), NamedArray(jnp.zeros(m), ("out",)))

    def loss(model, x, y):
        apply = lambda layer, x: x @ layer.weight.array + layer.bias.array
        return jnp.mean(jnp.square(apply(model[1], jnp.tanh(apply(model[0], x))) - y))

    def train(config, spike=None):
        """Losses, and how far each step went; the loss of step `spike` is far too large."""
        tx = config.build(STEPS)

        @jax.jit
        def take_train_step(model, opt_state, x, y, factor):
            obj_fun = lambda model: factor * loss(model, x, y)
            value, grads = jax.value_and_grad(obj_fun)(model)
            updates, opt_state = tx.update(
                grads, opt_state, params=model, obj_fn=obj_fun, loss=value
            )
            return optax.apply_updates(model, updates), opt_state, value, optax.tree.norm(updates)

        model = (layer(8, 16, 0), layer(16, 4, 1))
        state, losses, lengths = optax.with_extra_args_support(tx).init(model), [], []
        for i, (x, y) in enumerate(zip(np.tile(X, (5, 1, 1)), np.tile(Y, (5, 1, 1)), strict=True)):
            factor = 1e6 if spike and i in spike else 1.0
            model, state, value, length = take_train_step(model, state, x, y, factor)
            losses.append(float(value))
            lengths.append(float(length))
        return losses, lengths, state

    return {
        "OptimizerConfig": OptimizerConfig,
        "dataclass": dataclasses.dataclass,
        "theirs": AdamConfig,
        "train": train,
    }


# ---- Brax --------------------------------------------------------------------------------------


class LRSchedule(enum.Enum):
    NONE = "NONE"
    ADAPTIVE_KL = "ADAPTIVE_KL"


def brax():
    """google/brax 0b96d05: `ppo/optimizer.py`, and what `ppo/train.py` does with its optimizer."""
    axis, desired_kl, learning_rate = "i", 0.01, 3e-4

    def loss_and_pgrad_fn(params, normalizer_params, data, key):
        """The divergence is given with the data, so that the rule goes both ways."""
        x, y, kl = data
        value, grads = jax.value_and_grad(mean_square)(params, x - normalizer_params, y)
        return (value, {"kl_mean": kl, "loss": value}), jax.lax.pmean(grads, axis_name=axis)

    def adaptive_kl_learning_rate(optimizer_state, kl_mean):
        state = optimizer_state
        if isinstance(state, tuple) and not hasattr(state, "hyperparams"):
            state = optimizer_state[-1]
            assert hasattr(state, "hyperparams")
        lr = state.hyperparams["learning_rate"]
        lr = jnp.where(kl_mean > desired_kl * 2.0, jnp.maximum(1e-5, lr / 1.5), lr)
        small = (kl_mean < desired_kl / 2.0) & (kl_mean > 0.0)
        lr = jnp.where(small, jnp.minimum(1e-2, lr * 1.5), lr)
        state.hyperparams["learning_rate"] = lr
        return optimizer_state, lr

    def train(optimizer, lr_is_adaptive_kl):
        """The metrics of each step, on two devices that `vmap` stands for."""

        def minibatch_step(carry, data):
            optimizer_state, params, key = carry
            key, key_loss = jax.random.split(key)
            (_, metrics), grads = loss_and_pgrad_fn(params, 0.0, data, key_loss)
            lr = jnp.array(learning_rate)
            if lr_is_adaptive_kl:
                kl_mean = jax.lax.pmean(metrics["kl_mean"], axis_name=axis)
                optimizer_state, lr = adaptive_kl_learning_rate(optimizer_state, kl_mean)
            metrics["learning_rate"] = lr
            updates, optimizer_state = optimizer.update(grads, optimizer_state)
            return (optimizer_state, optax.apply_updates(params, updates), key), metrics

        kl = jnp.asarray([0.004, 0.03, 0.03, 0.0, 0.01, 0.001] * 2)
        data = X.reshape(STEPS, 2, 8, 8), Y.reshape(STEPS, 2, 8, 4), jnp.stack([kl, kl], 1)
        params = dense()
        carry = optimizer.init(params), params, jax.random.key(0)
        device = lambda carry, data: jax.lax.scan(minibatch_step, carry, data)
        mapped = jax.vmap(device, axis_name=axis, in_axes=(None, 1), out_axes=(None, 1))
        return jax.jit(mapped)(carry, data)[1]

    chain = (optax.clip_by_global_norm(0.5), optax.inject_hyperparams(optax.adam)(learning_rate))
    return {
        "ppo_optimizer": types.SimpleNamespace(LRSchedule=LRSchedule),
        "learning_rate": learning_rate,
        "learning_rate_schedule": "ADAPTIVE_KL",
        "max_grad_norm": 0.5,
        "theirs": optax.chain(*chain),
        "train": train,
    }


# ---- jaxpi -------------------------------------------------------------------------------------


def jaxpi():
    """PredictiveIntelligenceLab/jaxpi e85b694: `_create_optimizer` of `models.py`, and `PINN.step`."""

    def theirs(config):
        lr = optax.exponential_decay(
            init_value=config.learning_rate,
            transition_steps=config.decay_steps,
            decay_rate=config.decay_rate,
        )
        tx = optax.adam(learning_rate=lr, b1=config.beta1, b2=config.beta2, eps=config.eps)
        if config.grad_accum_steps > 1:
            tx = optax.MultiSteps(tx, every_k_schedule=config.grad_accum_steps)
        return tx

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.tanh(nn.Dense(16)(nn.tanh(nn.Dense(16)(x)))))[0]

    def train(create, config, count):
        """Losses of u'' = -sin(x), u(0) = 0, u(pi) = 1."""
        arch = Mlp()
        params = arch.init(jax.random.PRNGKey(0), jnp.ones(1))
        state = train_state.TrainState.create(apply_fn=arch.apply, params=params, tx=create(config))
        points = jnp.linspace(0, np.pi, 24)

        def loss(params):
            u = lambda x: state.apply_fn(params, x[None])
            residual = jax.vmap(jax.grad(jax.grad(u)))(points) + jnp.sin(points)
            ends = jnp.square(u(points[0])) + jnp.square(u(points[-1]) - 1)
            return jnp.mean(jnp.square(residual)) + ends

        def step(state, _):
            value, grads = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=jax.lax.pmean(grads, "batch")), value

        scan = lambda s: jax.lax.scan(step, s, length=count)
        one = jax.local_devices()[:1]
        replicated = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
        return np.asarray(jax.pmap(scan, axis_name="batch", devices=one)(replicated)[1])[0]

    config = types.SimpleNamespace(
        optimizer="Adam",
        learning_rate=1e-3,
        decay_steps=2000,
        decay_rate=0.9,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        grad_accum_steps=0,
    )
    return {"theirs": theirs, "config": config, "train": train}


# ---- big_vision, EasyLM, flax's Gemma ----------------------------------------------------------


def train(tx, params=None, steps=STEPS):
    """Losses, and the last state, by the step that all three have."""

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(mean_square)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = dense(width=512) if params is None else params
    state, losses = tx.init(params), []
    for x, y in zip(X[:steps], Y[:steps], strict=True):
        params, state, value = step(params, state, x, y)
        losses.append(float(value))
    return losses, state


def big_vision():
    """google-research/big_vision 0127fb6: `make` of `optax.py`, which finds the method by its name."""

    def make(config, params):
        mask = jax.tree.map(lambda _: True, params)
        method = operator.attrgetter(config.optax_name)(optax)
        kernels = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)
        return optax.chain(
            optax.masked(optax.clip_by_global_norm(config.grad_clip_norm), mask),
            optax.masked(method(**config.optax), mask),
            optax.scale(config.lr),
            optax.add_decayed_weights(config.wd, kernels),
            optax.masked(optax.scale_by_schedule(SCHEDULE), mask),
            optax.scale(-1.0),
        )

    config = types.SimpleNamespace(
        optax_name="scale_by_adam", optax={}, grad_clip_norm=1.0, lr=1.0, wd=1e-2
    )
    return {"config": config, "make": make, "train": train}


def easylm():
    """young-geng/EasyLM fe5b2c3: `AdamWOptimizerFactory`, and `match_partition_rules` of `jax_utils.py`."""
    rules = (("backbone/kernel", P("fsdp", "mp")), ("head/kernel", P("mp", "fsdp")), (".*", P()))

    def match_partition_rules(rules, tree):
        def spec(path, leaf):
            names = [
                str(getattr(x, "key", getattr(x, "name", getattr(x, "idx", "")))) for x in path
            ]
            if leaf.ndim == 0 or leaf.size == 1:
                return P()
            return next(ps for rule, ps in rules if re.search(rule, "/".join(names)))

        return jax.tree_util.tree_map_with_path(spec, tree)

    def weight_decay_mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", params)

    def chain(adamw):
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    config = types.SimpleNamespace(b1=0.9, b2=0.95, weight_decay=1e-2)
    theirs = optax.adamw(SCHEDULE, 0.9, 0.95, weight_decay=1e-2, mask=weight_decay_mask)
    return {
        "config": config,
        "learning_rate_schedule": SCHEDULE,
        "weight_decay_mask": weight_decay_mask,
        "rules": rules,
        "match_partition_rules": match_partition_rules,
        "chain": chain,
        "theirs": theirs,
        "train": train,
    }


def gemma():
    """google/flax 18f8f31: `examples/gemma/train.py`, whose weights are on a mesh of explicit axes."""
    config = types.SimpleNamespace(weight_decay=0.1)
    theirs = optax.adamw(SCHEDULE, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)

    def train(tx, params):
        """Weights after a few steps by gradients that lie where they do, and the last state."""
        state, update = tx.init(params), jax.jit(tx.update)
        for t in range(STEPS):
            grads = jax.tree.map(lambda x, t=t: jnp.cos(x + t), params)
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    return {"config": config, "learning_rate_fn": SCHEDULE, "theirs": theirs, "train": train}


# ---- names -------------------------------------------------------------------------------------

# The order of the page. `import jgrad`, for jaxpi `import jax`, for big_vision `import optax` are the page's.
FILES = tuple(
    set(names.split())
    for names in (
        "re jax jnp optax muon get_adamw_mask config learning_rate_schedule model",
        "re jax jnp optax muon _get_path_mask_fn get_adamw_mask _compute_rolling_stats",
        "jax jnp nnx optax PeftTrainer model schedule training_config",
        "abc re warnings dataclass partial Callable Optional draccus eqx jax np optax jnp haliax "
        "OptimizerConfig AdamConfig ClipUpdateNormConfig SkipStepConfig",
        "functools time flax jax jnp np optax ppo_optimizer ppo_losses learning_rate max_grad_norm "
        "learning_rate_schedule",
        "partial jnp lax jit grad pmap random jacfwd jacrev tree_map tree_reduce tree_leaves optax "
        "jax",
        "mlc optax config",
        "os time partial re dataclasses random config_dict ConfigDict jax jnp np logging optax config "
        "learning_rate_schedule weight_decay_mask",
        "contextlib dataclasses time partial flax nnx jax jnp np optax ocp config learning_rate_fn model",
    )
)
