"""Every block of README, docs/ and the notes runs as a reader runs it, and does what its text says.

A block runs alone unless it has an entry here: the blocks that come before it, what the page leaves
to the reader, and a function that checks what comes out.
"""

import contextlib
import io
import itertools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import jgrad
from jgrad._backward.step_in_backward import forced
from tests.support import trainers
from tests.support.eight_bits import unquantized
from tests.support.loops import assert_equal
from tests.support.pages import GUIDES, NOTES, blocks, page, rows, run_example
from tests.support.precision import in_64_bits

README, STARTED, WRAPPERS = "README.md", "docs/getting_started.md", "docs/wrappers.md"
PACKED, MUON, DEVICES = "docs/packed.md", "docs/muon.md", "docs/devices.md"
MEMORY, RUNS, METHODS = "docs/memory.md", "docs/runs.md", "docs/methods.md"
CHOOSE, OPTAX, PYTORCH = "docs/choose.md", "docs/from_optax.md", "docs/from_elsewhere.md"
DIFFERENTIATE, YOUR_OWN = "docs/differentiate.md", "docs/your_own.md"
COMPILED, FOUR_BYTES = "benchmarks/notes/accelerators.md", "docs/four_bytes.md"
TRAINERS, STARTS, FAQ = "docs/trainers.md", "docs/hyperparameters.md", "docs/faq.md"

BLOCKS = [(name, i) for name in (README, *GUIDES, *NOTES) for i in range(len(blocks(name)))]
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


# ---- a first training --------------------------------------------------------------------------


@after(README, 0)
def readme(names, printed):
    loss = re.fullmatch(r"loss (\S+) after 300 steps\n", printed)[1]
    assert float(loss) < 1e-2  # from 0.55, the mean square of y


@after(STARTED, 1, 0)
def under_jit(names, printed):
    assert int(names["state"].step) == 201
    assert float(names["value"]) < 5e-3  # from 0.5
    text = re.search(r"`jax.tree.map\((.*?)\)` is `(.*?)`", page(STARTED))
    assert str(jax.tree.map(jnp.shape, names["state"].mw)) == text[2]


@after(STARTED, 2, 0, 1)
def schedules(names, printed):
    """`adamw` goes on from the state, and `safe` counts a NaN."""
    params = names["params"]
    grads = jax.tree.map(lambda w: w * jnp.nan, params)
    assert int(names["adamw"].update(grads, names["state"], params)[1].step) == 202
    assert int(names["safe"].update(grads, names["safe"].init(params), params)[1].skipped) == 1


after(STARTED, 3, 0, 1)(it_runs)
after(STARTED, 4, 0, 1)(it_runs)


# ---- wrappers, packed trees, Muon --------------------------------------------------------------


@after(WRAPPERS, 0)
def order_of_wrappers(names, printed):
    """What the text reads in the state is there."""
    state = names["tx"].init({"w": jnp.ones((2, 3), jnp.float16)})
    assert (float(state.loss_scale), int(state.skipped)) == (2.0**15, 0)
    assert optax.tree.get(state, "average")["w"].dtype == jnp.float32


def mixed_model():
    return {"model": {"w": jnp.ones(3), "n": jnp.arange(2), "z": jnp.ones(2, jnp.complex64)}}


@after(PACKED, 1, names=mixed_model)
def integer_leaves(names, printed):
    assert_equal(names["model"], mixed_model()["model"])


after(PACKED, 0, (README, 0))(it_runs)
after(MUON, 0, slow=True)(it_runs)


@after(MUON, 1, slow=True)
def muon_clip(names, printed):
    """The largest logit of the queries and keys that come out is tau where it was more."""
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"query": keys[0], "key": keys[1]}
    w = {name: jax.random.normal(key, (8, 2, 4)) for name, key in w.items()}
    x = jax.random.normal(keys[2], (5, 8))

    def largest(w):
        query, key = (jnp.einsum("td,dhs->ths", x, w[n]) for n in ("query", "key"))
        return jnp.max(jnp.einsum("ths,uhs->htu", query, key), axis=(1, 2))

    tau = float(jnp.mean(largest(w)))  # one head above, one below
    clipped = largest(names["clipped"](w, largest(w), tau))
    assert float(clipped.max()) == pytest.approx(tau, rel=1e-5)
    assert float(clipped.min()) == pytest.approx(float(largest(w).min()), rel=1e-5)
    new, _ = names["step"](w, names["tx"].init(w), w, largest(w))
    assert new["query"].shape == (8, 2, 4)


# ---- many devices ------------------------------------------------------------------------------


def for_a_mesh():
    """A model and its loss."""
    loss = lambda w, x: jnp.mean(jnp.square(x @ w["w"]))
    return {"params": {"w": jnp.ones((16, 3))}, "loss": loss}


after(DEVICES, 0, names=for_a_mesh)(it_runs)


@after(DEVICES, 1, 0, names=for_a_mesh, slow=True)
@after(DEVICES, 3, 0, names=for_a_mesh, slow=True)
def sharded_state_trains(names, printed):
    """Ten steps, each with a smaller loss."""
    params, state, batch = names["params"], names["state"], jnp.ones((8, 16))
    losses = []
    for _ in range(11):
        losses.append(float(names["loss"](jgrad.unpack(params), batch)))
        params, state, *_ = names["step"](params, state, batch)
    assert all(b < a for a, b in itertools.pairwise(losses))


@after(DEVICES, 2, 0, names=for_a_mesh)
def gradients_in_shard_map(names, printed):
    """Those of the whole batch."""
    batch = jnp.arange(128.0).reshape(8, 16)
    found = names["gradients"](names["params"], batch)
    expected = jax.grad(names["loss"])(names["params"], batch)
    assert jnp.allclose(found["w"], expected["w"], rtol=1e-6)


# ---- memory ------------------------------------------------------------------------------------


@after(MEMORY, 0, names=lambda: {"tx": jgrad.adam(0.1)})
def donation(names, printed):
    """The results are in the order of the arguments, and nothing is copied; else every leaf is."""
    params = {f"w{i}": jnp.ones((64, 64)) for i in range(4)}
    args, step = (names["tx"].init(params), params, params), names["step"]
    swapped = jax.jit(lambda state, params, g: step(params, state, g), donate_argnums=(0, 1))
    orders = step.lower(params, *args[::2]), swapped.lower(*args)
    copies = [re.findall(r"= f32\[64,64\]\S* copy\(", x.compile().as_text()) for x in orders]
    assert not copies[0]
    assert len(copies[1]) >= 4


@after(MEMORY, 1, slow=True)
def what_half_precision_loses(names, printed):
    """As the comments have it, to three digits."""
    numbers = [f"{float(x):.3f}" for x in printed.split()]
    assert numbers == re.findall(r"^print\(.*\)  # (0\.\d{3}),", page(MEMORY), re.MULTILINE)
    assert len(set(numbers)) == 3


@after(MEMORY, 2)
def products_in_half_precision(names, printed):
    args = {"w": jnp.ones((4, 2))}, jnp.ones((3, 4)), jnp.zeros((3, 2))
    assert jgrad.grad(names["loss"])(*args)["w"].dtype == jnp.float32
    assert re.search(r":bf16\[3,2\] = dot_general", str(jax.make_jaxpr(names["loss"])(*args)))


@after(MEMORY, 3, slow=True)
def whole_step(names, printed):
    """What a TPU would make of each leaf, as the comment has it."""
    answers = dict(line.split(" ", 1) for line in printed.splitlines())
    assert answers[".inner.mw['w']"] == answers[".inner.vw['w']"] == "one kernel"
    shown = re.search(r"# (\S+) (XLA: .*) \.\.\.$", page(MEMORY), re.MULTILINE)
    assert answers[shown[1]] == shown[2]


@after(MEMORY, 4, 3, slow=True)
def other_moments_and_back(names, printed):
    jax.tree.map(assert_equal, unquantized(names["again"]), names["arrays"])


@after(MEMORY, 5, slow=True)
def state_of_flax(names, printed):
    assert names["new"].opt_state.mw["kernel"].codes[...].dtype == jnp.int8
    assert not names["account"].zero


def in_both_forms(step, params, state, *args):
    """A step is the ordinary one on a CPU; in the backward pass it has the same loss and weights."""
    expected = step(*jax.tree.map(jnp.copy, (params, state)), *args)  # it donates
    with forced():
        found = jax.jit(step.__wrapped__)(params, state, *args)
    for x, y in zip(*map(jax.tree.leaves, (found[::2], expected[::2])), strict=True):
        assert jnp.allclose(x, y, rtol=2 * jnp.finfo(x.dtype).eps)  # a bfloat16 may round elsewhere
    return found


@after(FOUR_BYTES, 0)
@after(FOUR_BYTES, 1, 0, slow=True)
def four_bytes(names, printed):
    """Weights and state have four bytes per parameter, and the loss falls, by either form."""
    params, state, args = (
        names["params"],
        names["tx"].init(names["params"]),
        (names["x"], names["y"]),
    )
    assert nbytes((params, state)) == pytest.approx(4.03 * size(params), rel=0.01)
    before = float(names["loss"](params, *args))
    for _ in range(3):
        params, state, _ = in_both_forms(names["step"], params, state, *args)
    assert float(names["loss"](params, *args)) < 0.9 * before


@after(COMPILED, 0)
def counting_a_step(names, printed):
    """Without the compilers it says how to install them; with them, what a step costs."""
    assert 'pip install ".[accelerators]"' in printed or printed.startswith("28.0")


# ---- runs, and states of others ----------------------------------------------------------------


def of_a_run():
    """What docs/runs.md leaves to the reader."""
    params = {"embed": {"table": jnp.ones((5, 4))}, "head": jnp.ones((4, 2))}
    grads = jax.tree.map(jnp.ones_like, params)
    return {"params": params, "grads": grads}


@after(RUNS, 0, names=of_a_run, slow=True)
def diverging(names, printed):
    """What the table says is in the report."""
    for name in re.findall(r"^\| `([a-z_/.]+)`", page(RUNS), re.MULTILINE):
        assert any(key.startswith(name.removesuffix("...")) for key in names["numbers"]), name


after(RUNS, 1, names=of_a_run, slow=True)(it_runs)


@after(RUNS, 2, slow=True)
def change_in_the_middle(names, printed):
    assert printed == blocks(RUNS, "text")[0]
    _, state = names["tx"].update(names["grads"], names["state"], names["params"])
    assert (int(state.mini_step), int(state.inner[0].step)) == (3, 1)


@after(OPTAX, 0, names=lambda: {"opt_state": optax.adam(0.1).init(jnp.ones(3))})
def state_of_optax(names, printed):
    assert_equal(names["state"], jgrad.adam(0.1).init(jnp.ones(3)))


# `test_from_pytorch.py` has a model and an optimizer of PyTorch's numbers.
NOTHING = types.SimpleNamespace(named_parameters={}.items)
after(PYTORCH, 1, names=lambda: {"model": NOTHING, "adam": None, "steps": 3})(it_runs)


# ---- derivatives, and methods of one's own -----------------------------------------------------


def tasks(seed, dtype):
    """Points of two sines with other phases."""
    x = jnp.asarray(np.random.default_rng(seed).uniform(-3, 3, size=(2, 10, 1)), dtype)
    return [(part, jnp.sin(part + seed)) for part in x]


@after(DIFFERENTIATE, 0)
def meta_gradients(names, printed):
    """Those of finite differences, by the first weights and by each rate; and they can be followed."""
    meta, given = names["meta"], tasks(1, jnp.float32)
    value, update, losses = jax.jit(names["meta_loss"]), jax.jit(names["outer"].update), []
    state = names["outer"].init(meta)
    for _ in range(20):
        losses.append(float(value(meta, *given)))
        updates, state = update(names["gradient"](meta, *given), state, meta)
        meta = optax.apply_updates(meta, updates)
    assert losses[-1] < losses[0]
    traced = str(jax.make_jaxpr(names["gradient"])(meta, *given))
    assert "checkpoint" in traced or "remat" in traced
    with in_64_bits():
        given = tasks(1, jnp.float64)
        flat, tree = ravel_pytree(jax.tree.map(lambda x: np.asarray(x, np.float64), meta))
        found, _ = ravel_pytree(names["gradient"](tree(flat), *given))
        assert np.all(np.asarray(jax.tree.leaves(tree(found)["log_rates"])) != 0)
        along = jnp.asarray(np.random.default_rng(0).normal(size=flat.size))
        at = lambda k: value(tree(flat + k * 2e-5 * along), *given)
        expected = (8 * (at(1.0) - at(-1.0)) - (at(2.0) - at(-2.0))) / 24e-5
        np.testing.assert_allclose(found @ along, expected, rtol=1e-8)


def test_functional_updates_stop_gradients():
    """Unless they are told otherwise, as the page says."""

    def updated(lr, **options):
        return jnp.sum(jgrad.adam_update(jnp.ones(3), jnp.ones(3), lr, 0.0, 0.0, 1, **options)[0])

    assert float(jax.grad(updated)(0.1)) == 0
    slope = jax.grad(lambda lr: updated(lr, stop_gradients=False))(0.1)
    assert float(slope) == pytest.approx(-3, rel=1e-5)


@after(YOUR_OWN, 0)
def own_method(names, printed):
    """The first direction of AdaMax is the sign of the gradient, whatever the betas are."""
    np.testing.assert_allclose(names["updates"]["w"], -1e-3 * 1.1, rtol=1e-5)
    np.testing.assert_allclose(names["updates"]["b"], -1e-2, rtol=1e-5)
    state = names["state"]
    assert int(state.skipped) == 0
    moments = optax.tree.get(state, "mw")
    assert isinstance(moments["w"], jgrad.Blocks)
    # Gradients of norm 1, and the beta of the call.
    np.testing.assert_allclose(moments["b"], 0.05 / (17 * 256) ** 0.5, rtol=1e-6)


# ---- the defaults of each method ---------------------------------------------------------------


def weights(seed):
    """Leaves of one size, so that steps of all methods matter."""
    shapes = {"embed": (50, 8), "block": {"w": (8, 16), "b": (16,)}, "head": (16, 10)}
    zeros = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    drawn = optax.tree.random_like(jax.random.key(seed), zeros)
    return jax.tree.map(lambda x: 0.02 * x / jnp.sqrt(jnp.mean(x**2)), drawn)


def default_trains(names, printed):
    """Most of a quadratic loss is gone after its steps; targets have the norms of the weights."""
    tx, w, target = names["tx"], weights(0), weights(1)

    def loss(w):
        return optax.tree.norm(jax.tree.map(jnp.subtract, w, target), squared=True) / 2

    def body(carry, _):
        w, state = carry
        updates, state = tx.update(jax.grad(loss)(w), state, w)
        return (optax.apply_updates(w, updates), state), None

    train = jax.jit(lambda carry: jax.lax.scan(body, carry, length=names["steps"])[0])
    last, state = train((w, tx.init(w)))
    assert float(loss(optax.tree.get(state, "average", last))) < 0.1 * float(loss(w))


for i in range(1, len(blocks(METHODS))):
    after(METHODS, i, 0, slow=True)(default_trains)


def test_each_method_has_a_default():
    assert len(re.findall(r"^## \w+$", page(METHODS), re.MULTILINE)) + 1 == len(blocks(METHODS))


# ---- choose a setup ----------------------------------------------------------------------------

# The blocks, in the order of the page.
COMMON, FITS, SMALL, STACKED, DEEP_MUON, BF16, LARGE, OFFLOADED, *OTHERS = range(14)
JIT, FROZEN, RATES, BATCHES, FP16, MANY = OTHERS


def setup(index, *before, cost=None, steps=30):
    """A block that trains behind the common lines: in `steps`, half of the loss is gone.

    Args:
      index: of the block.
      before: other blocks.
      cost: bytes per parameter, the gradient included, which the page's table says.
      steps: of training.
    """

    def enter(check):
        @after(CHOOSE, index, COMMON, *before, slow=True)
        def trains(names, printed):
            params, state = jax.tree.map(jnp.copy, (names["params"], names["state"]))
            losses = []  # the step donates
            for _ in range(steps):
                params, state, loss = names["step"](params, state, names["batch"])
                losses.append(float(loss))
            assert losses[-1] < 0.5 * losses[0]
            if cost:
                found = (2 * nbytes(params) + nbytes(state)) / size(params)
                assert found == pytest.approx(cost, rel=0.01)
            check(names, params, state, losses)

    return enter


def it_trains(names, params, state, losses):
    """What it does is tested elsewhere."""


@setup(FITS, cost=16, steps=100)
def first_rate_is_zero(names, params, state, losses):
    assert losses[1] == losses[0]


setup(SMALL)(it_trains)
setup(STACKED, cost=16)(it_trains)
setup(BF16, cost=12)(it_trains)
setup(RATES)(it_trains)


@setup(DEEP_MUON, STACKED)
def no_second_moments(names, params, state, losses):
    assert state.vw["layers"]["w"] is None


@setup(FP16, cost=16)
def float16(names, params, state, losses):
    """A gradient that overflows changes only the count and the scale, which halves."""
    x, y = names["batch"]
    before = jax.tree.map(jnp.copy, (params, state.skipped, state.loss_scale))
    same, state, _ = names["step"](params, state, (x, 1e30 * y))
    assert_equal(same, before[0])
    assert (int(state.skipped), float(state.loss_scale)) == (before[1] + 1, before[2] / 2)


@setup(LARGE, STACKED)
def too_large(names, params, state, losses):
    """4.03 bytes per parameter of a large stack, by either form of the step."""
    large, adam = params["layers"]["w"], state.inner.inner
    found = large.nbytes + nbytes((adam.mw["layers"]["w"], adam.vw["layers"]["w"]))
    assert found == pytest.approx(4.03 * large.size, rel=0.002)
    in_both_forms(names["step"], params, state, names["batch"])


@setup(OFFLOADED)
def on_the_host(names, params, state, losses):
    """6.03 bytes per parameter of a large leaf, with the state on the host."""
    large, adam = params["hidden"]["w"], state.inner.inner
    found = 2 * large.nbytes + nbytes((adam.mw["hidden"]["w"], adam.vw["hidden"]["w"]))
    assert found == pytest.approx(6.03 * large.size, rel=0.002)
    if hasattr(jax, "memory"):
        assert {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}


@setup(JIT)
def many_devices(names, params, state, losses):
    """Each has its part of the moments, and all have the parameters."""
    for x in jax.tree.leaves((state.mw, state.vw)):
        share = x.addressable_shards[0].data.size
        assert share == (x.size if x.shape == (1,) else x.size // 8)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(params))


@setup(FROZEN)
def frozen_leaves(names, params, state, losses):
    assert_equal(params["hidden"], names["params"]["hidden"])
    assert size(state) == 2 * size(params["head"]) + 1


@setup(BATCHES, steps=120)
def large_batches(names, params, state, losses):
    """Four mini-batches are one update, the first with a rate of 0."""
    changes = [i for i, (a, b) in enumerate(itertools.pairwise(losses), 1) if a != b]
    assert changes == list(range(8, 120, 4))


@after(CHOOSE, MANY, COMMON, slow=True)
def many_models_at_once(names, printed):
    """The round is the mean of clients that have gone apart."""
    assert_equal(names["params"], jax.tree.map(lambda p: p.mean(0), names["models"]))
    assert float(jnp.ptp(names["models"]["head"]["b"])) > 1e-3


# ---- hyperparameters, and questions ------------------------------------------------------------

# The names of the calls, in the order of the table, and the updates after which a rate is largest.
PEAKS = {"gpt": 2000, "vit": 10_000, "sgd": 50_000, "lars": 782, "lamb": 2000}
CALLS = [*PEAKS, "ppo", "dit", "pinn"]


@after(STARTS, 0)
def hyperparameters(names, printed):
    """Each call reaches the learning rate of its row, and decays and clips as the row says."""
    table = rows(page(STARTS))
    assert len(table) == len(CALLS)
    w = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    zeros, large = (jax.tree.map(lambda p, x=x: jnp.full_like(p, x), w) for x in (0.0, 1e3))
    for (_, _, rate, decay, _), name in zip(table, CALLS, strict=True):
        tx = jgrad.watch(names[name])
        state = tx.init(w)
        _, first = optax.tree.get_all_with_path(state, "step")[0]
        at = jnp.full_like(first, PEAKS.get(name, 0))
        state = optax.tree.set(state, step=at)
        updates, state = tx.update(zeros, state, w)
        peak, (decayed, *clipped) = float(rate.split(",")[0]), map(float, decay.split(";"))
        found = jgrad.report(state)
        assert float(found["learning_rate"]) == pytest.approx(peak, rel=1e-3), name
        assert not updates["b"].any()
        if name in ("gpt", "vit", "sgd"):
            looked_ahead = 1.9 if name == "sgd" else 1.0  # by Nesterov's momentum
            expected = -peak * decayed * looked_ahead
            np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)
        else:
            assert updates["w"].any() == (decayed > 0), name
        state = jgrad.report(tx.update(large, tx.init(w), w)[1])
        factor = float(state.get("clip_factor", 1.0))
        assert factor == pytest.approx(clipped[0] / 3e3 if clipped else 1.0, rel=1e-5), name


def with_a_nan():
    """A gradient that is not finite in one leaf."""
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    return {"params": params, "grads": params | {"w": jnp.full((2, 3), jnp.nan)}}


@after(FAQ, 0, names=with_a_nan)
def nan_at_step_0(names, printed):
    assert names["bad"] == ["grad_norm", "grad_norm/w"]
    assert_equal(names["updates"], jax.tree.map(jnp.zeros_like, names["params"]))


def test_the_name_of_a_question():
    with pytest.raises(AttributeError, match=r"expected `jgrad\.adam` with `weight_decay=`"):
        jgrad.adamw  # noqa: B018


def test_bytes_of_wrappers_in_the_answers():
    """As the notes have them, which tests count."""
    table = rows(page("benchmarks/notes/what_wrappers_cost.md"))
    moved = {row[0]: int(row[1].split(" / ")[0]) for row in table if re.match(r"\d+ / ", row[1])}
    answer = page(FAQ).partition("## Which wrapper is slow?")[2]
    adamw, skipped, clipped = (moved[x] for x in ("AdamW", "skip(AdamW)", "clip + AdamW"))
    assert f"`skip_nonfinite` adds {skipped - adamw} to AdamW's {adamw} bytes" in answer
    assert f"clipping {clipped - adamw}." in answer
    for name in (
        "skip(optax's AdamW)",
        "skip(optax's AdamW, branch=True)",
        "accumulate, emit=False",
    ):
        assert re.search(rf"\b{moved[name]}\b", answer), name


# ---- in your trainer ---------------------------------------------------------------------------

# The blocks, in the order of the page.
MAXTEXT, TUNIX, TOKENS, LEVANTER, BRAX, OPENPI, PINN = range(7)
# A few roundings of half a unit in the last place in each of twelve steps, one way in the worst case.
IN_STEPS = 12 * 8 * 2.0**-24


@after(TRAINERS, MAXTEXT, names=trainers.maxtext)
def maxtext(names, printed):
    """The same losses; where the backbone is frozen, those of clipping the head alone."""
    ours, theirs, train, config = (names[x] for x in ("get_optimizer", "theirs", "train", "config"))

    def losses(make, dtype=jnp.float32, **changes):
        changed = types.SimpleNamespace(**vars(config) | changes)
        params = jax.tree.map(lambda x: x.astype(dtype), trainers.dense())
        return train(make, changed, params)

    replaced = {"skip_step_on_spikes": True, "gradient_clipping_threshold": 0.0}
    expected = losses(theirs)[0]
    np.testing.assert_allclose(losses(ours, **replaced)[0], expected, rtol=IN_STEPS)

    def head_alone(config, schedule, model=None):
        """Clips what is trained, as MaxText does not."""
        labels = {"backbone": "frozen", "head": "trained"}
        clipped = optax.chain(optax.clip_by_global_norm(1.0), theirs(config, schedule))
        parts = {"frozen": optax.set_to_zero(), "trained": clipped}
        return optax.partition(parts, labels)

    frozen = {"trainable_parameters_mask": ["^head/"]}
    expected = losses(head_alone, gradient_clipping_threshold=0.0)[0]
    assert not np.allclose(losses(theirs, **frozen)[0], expected, rtol=1e-2)
    np.testing.assert_allclose(losses(ours, **replaced, **frozen)[0], expected, rtol=IN_STEPS)
    moments = losses(ours, jnp.bfloat16, **replaced)[2]
    dtypes = {x.dtype for x in jax.tree.leaves(optax.tree.get(moments, "vw"))}
    assert dtypes == {jnp.dtype("float32")}


@after(TRAINERS, TUNIX, names=trainers.tunix)
def tunix(names, printed):
    """The same losses and learning rates; in bfloat16, `nnx.cond` accepts the state as it is."""
    train, trainer, make = names["train"], names["PeftTrainer"], names["Regression"]
    config = names["training_config"]
    losses, last = train(names["trainer"])
    expected, their_last = train(trainer(make(), names["theirs"], config))
    np.testing.assert_allclose(losses, expected, rtol=IN_STEPS)
    assert last.learning_rate() == their_last.learning_rate()
    half = lambda tx, restore: trainer(
        make(jnp.bfloat16), tx, types.SimpleNamespace(restore=restore)
    )
    with pytest.raises(Exception, match=r"float32\[64\].*bfloat16\[64\]"):
        train(half(names["theirs"], False))
    train(half(names["theirs"], True))
    losses, _ = train(half(names["adam"](learning_rate=names["schedule"]), False))
    assert losses[-1] < losses[0]


@after(TRAINERS, TOKENS, names=trainers.nnx_loop)
def tokens_of_mini_batches(names, printed):
    """Three windows of four mini-batches train as three batches; one of a mini-batch has no token."""
    masks = np.random.default_rng(1).uniform(size=(12, 16)) < np.linspace(0.1, 0.9, 12)[:, None]
    masks = (masks * 0.25).astype(np.float32)  # weights are fractions
    masks[5] = 0
    nnx, model = names["nnx"], names["model"]
    for batch in zip(trainers.X, trainers.Y, masks, strict=True):
        names["train_step"](model, names["optimizer"], batch)
    whole = trainers.Regression()
    optimizer = nnx.Optimizer(whole, optax.adam(names["schedule"]), wrt=nnx.Param)
    joined = [x.reshape(3, 64, *x.shape[2:]) for x in (trainers.X, trainers.Y, masks)]
    for batch in zip(*joined, strict=True):
        grads = nnx.grad(names["mean_loss"], has_aux=True)(whole, batch)[0]
        optimizer.update(whole, grads)
    assert int(names["optimizer"].opt_state.skipped[...]) == 1
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, whole)), strict=True):
        # Adam's first step is the sign of a gradient, and sums of 64 rows differ in their last digits.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@after(TRAINERS, LEVANTER, names=trainers.levanter)
def levanter(names, printed):
    """The same losses; steps with spikes of the loss are left out, and the report has the rate."""
    config = names["OptimizerConfig"].choices["jgrad"]()
    expected, _, _ = names["train"](names["theirs"]())
    losses, lengths, state = names["train"](config)
    np.testing.assert_allclose(losses, expected, rtol=5 * IN_STEPS)  # five times as many steps
    assert min(lengths[1:12]) > 0
    assert float(jgrad.report(state)["learning_rate"]) == 0  # its schedule is over
    _, lengths, state = names["train"](config, spike={50, 51, 52})
    assert int(jgrad.report(state)["spikes"]) == 3


@after(TRAINERS, BRAX, names=trainers.brax)
def brax(names, printed):
    """The same losses and learning rates, which go both ways; and theirs has no wrapper around it."""
    train, theirs, chain = names["train"], names["theirs"], names["chain"]
    _, found = train(names["optimizer"], names["minibatch_step"])
    _, expected = train(chain, theirs(chain))
    np.testing.assert_allclose(found["learning_rate"], expected["learning_rate"], rtol=1e-6)
    assert len(np.unique(found["learning_rate"])) == 3
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=IN_STEPS)
    wrapped = optax.apply_if_finite(chain, 5)
    with pytest.raises((AssertionError, TypeError, KeyError)):
        train(wrapped, theirs(wrapped))


@after(TRAINERS, OPENPI, names=trainers.openpi)
def openpi(names, printed):
    """In bfloat16, near their losses in float32; so is the average, where theirs is ten times off."""
    train, ours, theirs = names["train"], names["SixBytes"](), names["AdamW"]()
    losses, states = train(ours, jnp.bfloat16)
    (exact, wide), (_, half) = (train(theirs, x, 0.99) for x in (jnp.float32, jnp.bfloat16))
    # A weight of either layer is off by up to 2**-8 of itself, and errors are squared.
    np.testing.assert_allclose(losses, exact, rtol=4 * 2.0**-8)
    last, kernel = states[-1], lambda tree: tree["b"]["kernel"][...]
    average = optax.tree.get(last.opt_state, "average")
    assert {x.dtype for x in jax.tree.leaves(average)} == {jnp.dtype("float32")}
    assert len(jax.tree.leaves(average)) == 2  # of four parameters, as two are frozen
    true = kernel(wide[-1].ema_params)
    error = lambda found: float(jnp.mean(jnp.abs(kernel(found).astype(jnp.float32) - true)))
    assert error(average) < 0.1 * error(half[-1].ema_params)
    moments = [optax.tree.get(last.opt_state, x)["b"]["kernel"] for x in ("mw", "vw")]
    weight = kernel(last.params)
    assert (2 * weight.nbytes + nbytes(moments)) / weight.size == pytest.approx(6.03, rel=0.002)


@after(TRAINERS, PINN, names=trainers.jaxpi)
def pinn(names, printed):
    """Adam's losses are theirs, also accumulated, and SOAP trains."""
    ours, theirs, train, config = (
        names[x] for x in ("_create_optimizer", "theirs", "train", "config")
    )
    for mini_batches in (0, 2):
        config.grad_accum_steps = mini_batches
        found, expected = (train(x, config, 12)[0] for x in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=IN_STEPS)
    config.optimizer, config.learning_rate, config.grad_accum_steps = "SOAP", 3e-3, 0
    losses = train(ours, config, 200)[0]
    assert losses[-1] < 1e-3 * losses[0]


def test_a_pinn_in_double_precision(standard_promotion, x64):
    """The losses of float64 steps: optax's Adam, and a mean of two equal gradients."""
    names = run_example(TRAINERS, PINN, IMPORTED | trainers.jaxpi())
    ours, train, config = (names[x] for x in ("_create_optimizer", "train", "config"))
    config.beta2 = 0.99
    expected = train(names["theirs"], config, 12, "float64")[0]
    with jax.numpy_rank_promotion("allow"):
        once, _ = train(ours, config, 12, "float64")
        config.grad_accum_steps = 2
        twice, state = train(ours, config, 24, "float64")
    np.testing.assert_allclose(once, expected, rtol=1e-12)
    np.testing.assert_allclose(twice[::2], expected, rtol=1e-12)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    assert all(x.dtype == jnp.float64 for x in floats)


# ---- all of them -------------------------------------------------------------------------------


def choice(block):
    marks = [pytest.mark.slow] if block in SLOW else []
    name, index = block
    return pytest.param(block, marks=marks, id=f"{name.rpartition('/')[2]}-{index}")


@pytest.mark.parametrize("block", [choice(block) for block in BLOCKS])
def test_block(block, standard_promotion):
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


def test_entries_are_of_blocks():
    assert ENTRIES.keys() <= set(BLOCKS)


def test_blocks_of_contributing():
    """`test_moments.py` and `test_hand_over.py` run them."""
    assert len(blocks("CONTRIBUTING.md")) == 2
