"""The rows of the matrix: every optimizer, with its reference and its functional twin.

A new optimizer is one more row. From it come the tests of `everywhere/`, of packed trees, of
moments in bfloat16 and 8 bits, of wrappers and of several devices, the comparison of signatures, the
states of golden files and the digests. `test_methods.py` says what a method without a row misses.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgrad
from tests.reference import optimizers as reference

RATE = 0.05
# The functional updates have Ivy's defaults, the pairs those of PyTorch and optax.
IVY = {"epsilon": 1e-7, "bias_correction": "step_size"}
MOMENTS = {"bias_correction": "moments"}
MASK = {"layer": {"w": True, "b": False}, "rest": [True, True, False]}

_NAMES_IN_REFERENCE = {"weight_decay_mask": "decay", "trust_ratio_mask": "trust"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One optimizer with one choice of options.

    Attributes:
      name: shown by pytest.
      make: its factory; the reference has the same name.
      options: keyword arguments of the factory.
      state: the fields of OptState that are in use.
      update: keyword arguments of its functional update, `<name>_update`, which make it the same;
        None where that has no such options.
      elementwise: whether the elements of a leaf do not know of each other.
      decays: whether weights move under a zero gradient.
      in_full: the moments that have no `moment_dtype`.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    options: dict[str, Any]
    state: tuple[str, ...] = ()
    update: dict[str, Any] | None = None
    elementwise: bool = True
    decays: bool = False
    in_full: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def tx(self, learning_rate: Any = RATE, **more: Any) -> optax.GradientTransformationExtraArgs:
        """The transformation."""
        return self.make(learning_rate, **(self.options | more))

    def number(self, name: str) -> Any:
        """An option, or its default."""
        return self.options.get(name, inspect.signature(self.make).parameters[name].default)

    @property
    def rounded(self) -> tuple[str, ...]:
        """The moments that have a `moment_dtype`."""
        return tuple(name for name in self.state if name not in self.in_full)

    def number_of_adam(self, option: str) -> Any:
        """Of leaves that are no matrices; None there stands for that of the matrices."""
        own = self.number(self.of_adam(option))
        return self.number(option) if own is None else own

    def of_adam(self, option: str) -> str:
        """The name of an option of Adam, of which methods of matrices have one for other leaves."""
        return f"adam_{option}" if self.has_matrices else option

    @property
    def kind(self) -> type:
        """The type of its state."""
        return {jgrad.soap: jgrad.SoapState, jgrad.adan: jgrad.AdanState}.get(
            self.make, jgrad.OptState
        )

    @property
    def has_all_slopes(self) -> bool:
        """Whether derivatives are those of finite differences; SOAP's take bases for constants."""
        return self.make is not jgrad.soap

    @property
    def moments_like_parameters(self) -> bool:
        """Whether moments have the shapes of parameters; NorMuon's and Adafactor's have others."""
        return self.options.get("rule") != "normuon" and "min_side" not in self.options

    @property
    def has_matrices(self) -> bool:
        """Whether some leaves are matrices, and all others Adam's."""
        return "matrices" in self.options

    @property
    def packs(self) -> bool:
        """Whether its parameters may be packed: a matrix may not."""
        return not self.has_matrices and "min_side" not in self.options

    @property
    def has_specs(self) -> bool:
        """Whether its `mesh_axes` are the PartitionSpecs of leaves, whose axes it tells apart."""
        return self.has_matrices or self.make is jgrad.adafactor

    @property
    def step(self) -> Callable[..., Any] | None:
        """The functional twin, `(w, g, lr, moments, t) -> (w, moments)`; None without one."""
        return None if self.update is None else self._step

    def _step(
        self, w: Any, g: Any, lr: Any, moments: dict[str, Any], t: Any
    ) -> tuple[Any, dict[str, Any]]:
        assert self.update is not None
        function = getattr(jgrad, f"{self.make.__name__}_update")
        given = {"w": w, "dcdw": g, "lr": lr, "step": t}
        given |= {f"{name}_tm1": x for name, x in moments.items()}
        kinds = inspect.signature(function).parameters.values()
        names = [x.name for x in kinds if x.kind is x.POSITIONAL_ONLY]
        results = function(*(given[name] for name in names), **self.update)
        replaced = [name for name in names if name == "w" or name.endswith("_tm1")]
        if len(replaced) == 1:
            results = (results,)
        given |= dict(zip(replaced, results, strict=True))
        return given["w"], {name: given[f"{name}_tm1"] for name in moments}

    def without_masks(self) -> "Case":
        """The same for a tree of any structure."""
        options = {k: v for k, v in self.options.items() if k not in _NAMES_IN_REFERENCE}
        return dataclasses.replace(self, options=options)

    def trajectory(self, w: Any, gradients: list[Any], rate: Any = RATE) -> list[list[np.ndarray]]:
        """The leaves of the weights after each step, by the reference."""
        options = {
            _NAMES_IN_REFERENCE.get(name, name): jax.tree.leaves(value)
            if name in _NAMES_IN_REFERENCE
            else value
            for name, value in self.options.items()
        }
        if self.has_matrices:
            options["matrices"] = jax.tree.leaves(self.options["matrices"](w))
        optimizer = getattr(reference, self.make.__name__)(jax.tree.leaves(w), rate, **options)
        return reference.trajectory(optimizer, [jax.tree.leaves(g) for g in gradients])


def moments_of(state: Any) -> dict[str, Any]:
    """The moments of a state by their names; None for those that the method does not have."""
    return {name: getattr(state, name) for name in state.__jgrad_fields__.moments}


def rank_two(params):
    """A choice of matrices for any tree; on `params()` the first leaves of both parts."""
    return jax.tree.map(lambda x: len(x.shape) >= 2, params)


CASES = [
    Case("gradient_descent", jgrad.gradient_descent, {}, update={}),
    Case("momentum", jgrad.gradient_descent, {"momentum": 0.9}, ("mw",)),
    Case("nesterov", jgrad.gradient_descent, {"momentum": 0.9, "nesterov": True}, ("mw",)),
    Case("decayed_descent", jgrad.gradient_descent,
     {"momentum": 0.8, "weight_decay": 0.1, "weight_decay_mask": MASK}, ("mw",), decays=True),
    Case("cautious_descent", jgrad.gradient_descent,
     {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "weight_decay_mask": MASK, "weight_decay_rule": "cautious"},
     ("mw",)),
    Case("adam", jgrad.adam, {}, ("mw", "vw"), update={"epsilon": 1e-8} | MOMENTS),
    Case("adam_moments", jgrad.adam, {"bias_correction": "moments", "epsilon": 0.1}, ("mw", "vw"),
     update={"bias_correction": "moments", "epsilon": 0.1}),
    Case("adam_uncorrected", jgrad.adam, {"bias_correction": None, "beta1": 0.0}, ("mw", "vw"),
     update={"bias_correction": None, "beta1": 0.0, "epsilon": 1e-8}),
    Case("adamw", jgrad.adam, {"weight_decay": 0.1, "beta2": 0.95, "weight_decay_mask": MASK} | IVY, ("mw", "vw"),
     decays=True),
    Case("adamw_cautious", jgrad.adam,
     {"weight_decay": 0.1, "weight_decay_mask": MASK, "weight_decay_rule": "cautious"}, ("mw", "vw")),
    Case("adamw_independent", jgrad.adam,
     {"weight_decay": 0.01, "weight_decay_mask": MASK, "weight_decay_rule": "independent"}, ("mw", "vw"),
     decays=True),
    Case("adan", jgrad.adan, {}, ("mw", "vw", "dw", "gw"), update={}),
    Case("adan_decayed", jgrad.adan, {"beta2": 0.5, "epsilon": 0.01, "weight_decay": 0.1, "weight_decay_mask": MASK},
     ("mw", "vw", "dw", "gw"), decays=True),
    Case("adan_cautious", jgrad.adan,
     {"weight_decay": 0.1, "weight_decay_mask": MASK, "weight_decay_rule": "cautious"}, ("mw", "vw", "dw", "gw")),
    Case("lion", jgrad.lion, {}, ("mw",), update={}),
    Case("lion_decayed", jgrad.lion, {"beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1, "weight_decay_mask": MASK},
     ("mw",), decays=True),
    Case("lion_cautious", jgrad.lion,
     {"weight_decay": 0.1, "weight_decay_mask": MASK, "weight_decay_rule": "cautious"}, ("mw",)),
    Case("lars", jgrad.lars, {"weight_decay": 0.01, "trust_coefficient": 0.1}, ("mw",), elementwise=False,
     decays=True),
    Case("lars_masked", jgrad.lars,
     {"weight_decay": 0.1, "nesterov": True, "weight_decay_mask": MASK, "trust_ratio_mask": MASK}, ("mw",),
     elementwise=False, decays=True),
    Case("lars_outside", jgrad.lars, {"rate_in_momentum": False, "epsilon": 1e-3}, ("mw",), elementwise=False),
    Case("lars_cautious", jgrad.lars,
     {"weight_decay": 0.1, "trust_coefficient": 0.1, "weight_decay_rule": "cautious"}, ("mw",), elementwise=False),
    Case("lars_plain", jgrad.lars, {"momentum": None, "trust_coefficient": 1.0, "weight_decay": 0.01},
     update={"decay_lambda": 0.01}, elementwise=False, decays=True),
    Case("lars_ivy", jgrad.lars, {"momentum": None, "trust_coefficient": 0.1, "weight_decay": 0.3, "rule": "ivy"},
     update={"trust_coefficient": 0.1, "decay_lambda": 0.3, "rule": "ivy"}, elementwise=False),
    Case("lamb", jgrad.lamb, {}, ("mw", "vw"), update={"epsilon": 1e-6} | MOMENTS, elementwise=False),
    Case("lamb_decayed", jgrad.lamb, {"weight_decay": 0.1, "min_trust_ratio": 0.01} | IVY, ("mw", "vw"),
     update={"decay_lambda": 0.1, "min_trust_ratio": 0.01}, elementwise=False, decays=True),
    Case("lamb_masked", jgrad.lamb, {"weight_decay": 0.1, "max_trust_ratio": 1.5, "bias_correction": "moments",
     "weight_decay_mask": MASK, "trust_ratio_mask": MASK}, ("mw", "vw"), elementwise=False, decays=True),
    Case("lamb_ivy", jgrad.lamb, {"weight_decay": 0.1, "rule": "ivy"} | IVY, ("mw", "vw"),
     update={"decay_lambda": 0.1, "rule": "ivy"}, elementwise=False),
    Case("lamb_cautious", jgrad.lamb,
     {"weight_decay": 0.1, "weight_decay_mask": MASK, "weight_decay_rule": "cautious"}, ("mw", "vw"),
     elementwise=False),
    Case("muon", jgrad.muon, {"matrices": rank_two, "scale": "match_rms_adamw", "weight_decay": 0.1}, ("mw", "vw"),
     elementwise=False, decays=True),
    Case("muon_masked", jgrad.muon, {"matrices": rank_two, "nesterov": False, "adam_learning_rate": 0.003,
     "coefficients": "polar_express", "weight_decay": 0.1, "weight_decay_mask": MASK, "adam_weight_decay": 0.01},
     ("mw", "vw"), elementwise=False, decays=True),
    Case("muon_independent", jgrad.muon, {"matrices": rank_two, "scale": "match_rms_adamw", "weight_decay": 0.01,
     "weight_decay_rule": "independent", "adam_weight_decay": 0.001}, ("mw", "vw"), elementwise=False, decays=True),
    Case("normuon", jgrad.muon,
     {"matrices": rank_two, "scale": "match_rms_adamw", "rule": "normuon", "momentum": 0.9}, ("mw", "vw"),
     elementwise=False),
    Case("muon_dion2", jgrad.muon,
     {"matrices": rank_two, "scale": "match_rms_adamw", "fraction": 0.5, "error_decay": 0.9, "weight_decay": 0.1},
     ("mw", "vw"), elementwise=False, decays=True),
    Case("muon_dion3", jgrad.muon, {"matrices": rank_two, "scale": "match_rms_adamw", "rule": "normuon",
     "fraction": 0.4, "weight_decay": 0.1, "weight_decay_rule": "cautious"}, ("mw", "vw"), elementwise=False),
    Case("adafactor", jgrad.adafactor, {}, ("vw",), elementwise=False, in_full=("vw",)),
    Case("adafactor_factored", jgrad.adafactor,
     {"min_side": 2, "beta2_cap": 0.9, "weight_decay": 0.1, "weight_decay_mask": MASK, "output_axes": (0,)},
     ("vw",), elementwise=False, decays=True, in_full=("vw",)),
    Case("adafactor_momentum", jgrad.adafactor,
     {"momentum": 0.9, "clip_threshold": 0.5, "weight_decay": 0.1, "weight_decay_rule": "cautious"}, ("mw", "vw"),
     elementwise=False, in_full=("vw",)),
    Case("adafactor_torch", jgrad.adafactor,
     {"min_side": 1, "rule": "torch", "epsilon": (1e-8, 1e-3), "scale_by_parameter": False}, ("vw",),
     elementwise=False, in_full=("vw",)),
    Case("soap", jgrad.soap, {"matrices": rank_two, "every": 3, "weight_decay": 0.01}, ("mw", "vw"),
     elementwise=False, decays=True),
    Case("soap_masked", jgrad.soap, {"matrices": rank_two, "every": 1, "max_side": 3, "first_step": "adam",
     "weight_decay": 0.1, "weight_decay_mask": MASK, "adam_learning_rate": 0.003, "adam_beta1": 0.9,
     "adam_beta2": 0.99, "adam_epsilon": 1e-6, "adam_weight_decay": 0.01}, ("mw", "vw"), elementwise=False,
     decays=True),
]  # fmt: skip

METHODS = tuple(dict.fromkeys(case.make for case in CASES))
# The first row of each method with each choice of moments.
ONE_EACH = tuple({(case.make, case.state): case.name for case in reversed(CASES)}.values())[::-1]

# What a test runs on by default: moments of each kind, each correction but one, masks, and each
# method with a rule of its own. `pytest --all` runs it on all cases.
CORE = ("momentum", "adam_moments", "adamw", "lars_masked", "lamb_decayed", "lamb_ivy")
FEW = ("adamw", "lars_masked")  # for tests that compile many programs
# The first row of each method with decay, and without.
DECAYED = tuple({(case.make, case.decays): case.name for case in reversed(CASES)}.values())[::-1]
# For the tests of the numbers; the last have options that no other has.
NUMBERS = (
    *dict.fromkeys((*ONE_EACH, *DECAYED)),
    *("adam_moments", "adam_uncorrected", "lamb_masked", "lamb_ivy", "muon_masked"),
)


def every_case(core: tuple[str, ...] = CORE, where: Callable[[Case], Any] | None = None) -> Any:
    """Parametrizes a test by `case`.

    Args:
      core: names of the cases that are not slow.
      where: which cases the test is about; all by default.
    """
    cases = [case for case in CASES if where is None or where(case)]
    marked = [pytest.param(c, marks=() if c.name in core else pytest.mark.slow) for c in cases]
    return pytest.mark.parametrize("case", marked, ids=str)


def params(dtype: Any = jnp.float32, seed: int = 0) -> dict[str, Any]:
    """A small model: a matrix, a scalar, a large-scaled tensor, and a bias that starts at zero."""
    rng = np.random.default_rng(seed)
    tree = {
        "layer": {"w": rng.normal(size=(4, 3)), "b": np.zeros(3)},
        "rest": [100 * rng.normal(size=(2, 1, 3)), rng.normal(), rng.normal(size=5)],
    }
    return jax.tree.map(lambda x: _array(x, dtype, rng), tree)


def gradients(steps: int, dtype: Any = jnp.float32, seed: int = 1) -> list[dict[str, Any]]:
    """Gradients for `params`, of scales from 1e-3 to 10; those of one leaf vanish in each third step."""
    rng = np.random.default_rng(seed)
    found = []
    for t in range(steps):
        scales = iter(10.0 ** rng.uniform(-3, 1, size=5))
        tree = jax.tree.map(lambda p, s=scales: next(s) * rng.normal(size=p.shape), params())
        if t % 3 == 0:
            tree["rest"][2] = np.zeros(5)
        found.append(jax.tree.map(lambda x: _array(x, dtype, rng), tree))
    return found


def _array(x: Any, dtype: Any, rng: np.random.Generator) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x * np.exp(1j * rng.uniform(0, 6, size=np.shape(x)))
    return jnp.asarray(x, dtype)
