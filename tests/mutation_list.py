"""Mutations of the library, in the order of its folders: every rule, norm, check, wrapper, layout.

The first four entries of each: the place, what is broken there, the pattern of an expression or of
statements that the place has once, and what stands in their place; `tests/support/edits.py` says
how both are written. The last: where to look for a test that notices, before the whole suite runs.
"""

from typing import NamedTuple

MATRIX = "tests/everywhere/test_matrix.py"
MESSAGES = "tests/everywhere/test_messages.py"
EDGES = "tests/everywhere/test_sharp_edges.py"
FUNCTIONAL = "tests/inputs/test_functional.py"
NORMS = "tests/layers/test_norms.py"
PACKED = "tests/packed/test_optimizers.py tests/packed/test_packing.py"
DEVICES = "tests/multi_device"
HAND_OVER = "tests/wrappers/test_hand_over.py"
SKIP = "tests/wrappers/test_skip_nonfinite.py"


class Mutation(NamedTuple):
    """An edit of one place of the library.

    Attributes:
      place: the name of a function, class or constant.
      name: what is broken.
      old: the pattern of what is replaced.
      new: the broken text.
      near: arguments of pytest, the tests that are run first.
    """

    place: str
    name: str
    old: str
    new: str
    near: str


MUTATIONS = [
    # ---- _trees
    Mutation("repeat", "a prefix gives each leaf once", "range(X)", "range(min(X, 1))", "tests/trees"),
    Mutation("flatten", "None is no leaf", "jax.tree.flatten(X, is_leaf=_)", "jax.tree.flatten(X)", "tests/trees"),
    Mutation("align", "a tree that is coarser in one place is the finest", "all", "any", "tests/trees"),
    Mutation("is_function", "a tree of rates is called", "not (_ and is_prefix(_, _))", "True", "tests/trees"),
    Mutation("is_function", "a schedule that is a tree is not called", "X and is_prefix(_, _)", "X", "tests/trees"),
    Mutation("arrays_of", "Python floats without a gradient become arrays", "_ and checks.is_number(_)", "False", "tests/inputs/test_models.py"),
    Mutation("moment.check_form", "an array in the place of codes", "_ and isinstance(_, Blocks) and not isinstance(_, Blocks)", "False", "tests/inputs/test_moments.py"),
    Mutation("check_momentum", "momentum above 1", "numbers.beta(_, _, _)", "pass", MESSAGES),
    Mutation("check_masks", "a mask that a count made", "arrays <= sum(map(checks.is_number, _))", "True", "tests/inputs/test_injected.py"),
    Mutation("AlignedArguments._finest", "the first argument is the finest", "None if _ is None else X[_.finest]", "X[0]", FUNCTIONAL),
    Mutation("pack_small._part", "a part of the parameters is another model", "_ is None and _ is None", "False", "tests/inputs/test_models.py"),
    Mutation("ema", "what init did not see is averaged", "None if o is None else X", "X", "tests/inputs/test_models.py"),
    Mutation("arrays_of", "variables are no parameters", "checks.values_of(X)", "X", "tests/inputs/test_models.py"),
    Mutation("same_shapes", "shapes are not compared", "X is not None and Y is not None", "X is not None and Y is not None and False", MESSAGES),
    Mutation("checks.at", "the path is left out of messages", "f' at {_}' if _ else ''", "''", MESSAGES),
    Mutation("broadcastable", "what broadcasts may enlarge a parameter", "result == to", "True", MESSAGES),
    Mutation("is_of_kind", "a real gradient beside a complex parameter", "bool(jnp.iscomplexobj(_) == jnp.iscomplexobj(_))", "True", MESSAGES),
    Mutation("is_number", "a bool is a number", "X and not isinstance(_, bool)", "X", MESSAGES),
    Mutation("in_range", "the end of a range belongs to it", "X <= Y < Z", "X <= Y <= Z", MESSAGES),
    Mutation("in_range", "numbers that float32 cannot hold", "abs(_) > float(jnp.finfo(_).max)", "False", MESSAGES),
    Mutation("no_out", "out= is ignored", "_ is not None", "False", MESSAGES),
    Mutation("boolean", "what is true in a condition is a flag", "not isinstance(_, (bool, np.bool_))", "False", MESSAGES),
    Mutation("where_it_lies", "what lay on the host stays on the device", "to_host(X)", "X", "tests/wrappers/test_offload.py"),
    # ---- _arithmetic
    Mutation("one_minus_power", "1 - beta^t as it is written", "-jnp.expm1(X)", "1 - jnp.exp(X)", "tests/arithmetic"),
    Mutation("safe_sqrt", "the root has an infinite slope at 0", "X == 0", "X < 0", "tests/arithmetic"),
    Mutation("squarable", "squares overflow", "X // 2", "X", "tests/arithmetic"),
    Mutation("saturated", "saturated hides infinities", "jnp.where(_, X, Y)", "X", "tests/arithmetic"),
    Mutation("beta_from_number", "1 - beta from a rounded beta", "1.0 - X", "1.0 - np.float32(X)", MATRIX),
    Mutation("abs_squared", "the squared modulus of the real part alone", "X + Y.imag * Y.imag", "X", "tests/arithmetic"),
    Mutation("real_dtype", "arithmetic in half precision", "np.float32", "arrays[0].real.dtype", MATRIX),
    Mutation("zeros_like", "zeros without the sharding", "jnp.where(X == X, Y, Y)", "jnp.broadcast_to(Y, X.shape)", DEVICES + "/test_placement.py"),
    Mutation("bounded_square", "second moments overflow", "jnp.minimum(X, jnp.asarray(_, X.dtype))", "X", "tests/arithmetic tests/everywhere/test_sharp_edges.py"),
    Mutation("once", "a schedule is computed for each leaf", "X / jax.lax.stop_gradient(_)", "X", "tests/everywhere/test_recipes.py -k operations"),
    Mutation("_in_state", "moments that go around the door are cast", "not fits", "False", "tests/inputs/test_moments.py"),
    Mutation("leafwise.run", "results of a batch in another order", "X = list(zip(*rows, strict=True))", "indices = indices[::-1]; X = list(zip(*rows, strict=True))", "tests/arithmetic"),
    Mutation("add_scaled", "momentum and decay without their factors", "scaled(X, _)", "X", MATRIX),
    Mutation("add_scaled", "momentum and decay overflow", "numerics.addable(X)", "X", "tests/arithmetic"),
    Mutation("add_scaled", "momentum and decay have the other sign", "X + Y", "X - Y", MATRIX),
    Mutation("rules.kept", "an update that is not committed is kept", "jnp.where(_, X, _)", "X", SKIP),
    Mutation("rules.kept", "a committed moment overflows", "numerics.clipped(X, _)", "X", SKIP),
    Mutation("kept_update", "a committed update overflows", "numerics.clipped(X, _)", "X", SKIP),
    Mutation("kept_update", "an update that is not committed is no zero", "jnp.where(_, X, jnp.zeros_like(Y))", "X", SKIP),
    Mutation("rules.average", "an average with swapped weights", "scaled(X, Y) + scaled(Z, W)", "scaled(Z, Y) + scaled(X, W)", "tests/wrappers/test_ema.py"),
    Mutation("rules.add", "weights ascend", "X + Y", "X - Y", FUNCTIONAL),
    Mutation("with_momentum", "Nesterov's form is heavy-ball", "_ is None", "True", MATRIX),
    Mutation("is_zero", "a decay of 0 is compiled", "isinstance(_, (int, float)) and _ == 0", "False", MATRIX),
    # ---- _gradients
    Mutation("_value_and_grad", "func is called twice", "X = jax.value_and_grad(Y, has_aux=True)(Z)", "Y(Z); X = jax.value_and_grad(Y, has_aux=True)(Z)", "tests/gradients"),
    Mutation("typed_as", "tangents have no place on a mesh", "not isinstance(_, jax.core.Tracer)", "True", "tests/gradients/test_surroundings.py"),
    Mutation("hvp", "hvp by another vector", "X.tangents(_)", "X.leaves", "tests/gradients"),
    Mutation("_value_and_grad", "the gradient of a gradient is an error", "getattr(_, _GRADIENT, None) is _", "False", "tests/gradients"),
    Mutation("_blocks_of_columns", "blocks of columns are not transposed", "jnp.moveaxis(X, 0, -1)", "X", "tests/gradients"),
    Mutation("_reverse", "always reverse mode", "_size(_) < _size(_)", "False", "tests/gradients"),
    Mutation("Arguments.__init__", "an argument twice", "len(set(_._chosen)) < len(_._chosen)", "False", "tests/gradients"),
    # ---- _layers
    Mutation("LayerAxes.within", "layers of a stack are one", "_ not in _.stacked", "True", "tests/layers"),
    Mutation("layer_axes.of_leaves", "negative axes as they are", "X % len(_)", "X", "tests/layers tests/multi_device/test_layers.py"),
    Mutation("read_mesh_axes", "a PartitionSpec without its tuples", "[X for Y in Z for X in Y if W]", "[X for Y in Z for X in Y[:1] if W]", "tests/layers"),
    Mutation("_choose", "sums that overflowed are not scaled", "jnp.where(_ == jnp.inf, _, X)", "X", NORMS),
    Mutation("_choose", "tiny sums are scaled once", "X < tiny", "X < 0", NORMS),
    Mutation("_norms", "norms are never rescaled", "jax.lax.cond(X, Y, Z)", "jax.lax.cond(X & False, Y, Z)", NORMS),
    Mutation("norms._mixed", "other layers change a norm", "jnp.where(_ == 1, _, X)", "X", NORMS),
    Mutation("_norms", "norms of shards are not combined", "_over_devices(X, _) if _ else X", "X", DEVICES + "/test_layers.py"),
    Mutation("ScaledNorm.value", "an infinite norm counts as finite", "jnp.where(_.mantissa == jnp.inf, _.mantissa, X)", "X", NORMS),
    Mutation("in_batches", "batches of other mesh axes are joined", "X or _.mesh_axes != _.mesh_axes", "X", DEVICES + "/test_layers.py"),
    Mutation("_may_be_sharded", "stacks share a batch", "bool(_.stacked) and (not _.mesh_axes)", "False", DEVICES + "/test_collectives.py"),
    Mutation("is_on_mesh", "leaves are stacked on a mesh", "X != AxisType.Manual", "X != X", DEVICES + "/test_collectives.py"),
    Mutation("_norm_of_all", "the norm of all is never rescaled", "jax.lax.cond(X, Y, Z)", "jax.lax.cond(X & False, Y, Z)", "tests/wrappers/test_clip.py"),
    Mutation("_norm_of_all", "the norm of all is rescaled one way", "1 / X", "jnp.ones_like(X)", "tests/wrappers/test_clip.py"),
    Mutation("norms._spans", "an eager call leaves the last arrays out", "range(0, X, _EAGER)", "range(0, X - _EAGER + 1, _EAGER)", NORMS),
    Mutation("one_where_zero", "a zero norm has no ratio of 1", "jnp.where((_ == 0) | (_ == 0), jnp.ones_like(X), X)", "X", MATRIX),
    Mutation("_root_of_quotient_jvp", "the slope of a root of a quotient", "X - Y", "X + Y", "tests/everywhere/test_meta_gradients.py " + FUNCTIONAL),
    Mutation("_quotient_jvp", "the slope of a quotient", "X - Y", "X + Y", "tests/everywhere/test_meta_gradients.py " + FUNCTIONAL),
    Mutation("scaled_by_trust_ratio", "masked leaves have a ratio", "X and np.any(_[_])", "X", MATRIX),
    Mutation("scaled_by_trust_ratio", "masks in a buffer are ignored", "isinstance(_[_], np.ndarray)", "False", PACKED),
    # ---- _packed
    Mutation("to_blocks", "stacked layers in another order", "(*X, *Y)", "(*Y, *X)", "tests/packed"),
    Mutation("layout_of", "max_size is ignored", "_ is not None and math.prod(_.shape) > _", "False", "tests/packed/test_layouts.py"),
    Mutation("layout_of", "multiple_of is ignored", "-(-X // _) * _", "X", "tests/packed/test_layouts.py"),
    Mutation("Layout.__reduce__", "pickles lose the axes of stacks", "dataclasses.astuple(X)", "(X.shape,)", "tests/packed/test_layouts.py"),
    Mutation("packing._zeros", "padding is not zero", "jnp.zeros", "jnp.ones", "tests/packed"),
    Mutation("_again", "like: dtypes are mixed", "_.dtype != _", "False", "tests/packed"),
    Mutation("_groups", "pieces in two turns lose one", "min(X, _ - _)", "X", "tests/packed/test_splitting.py"),
    Mutation("_split_each", "split outside of a branch", "jax.lax.platform_dependent(X, cpu=_, default=Y)", "Y(X)", "tests/packed/test_splitting.py"),
    Mutation("rows._in_chunks", "the last chunk is dropped", "X[Y, _ROWS - Z:]", "X[Y, :Z]", "tests/packed/test_row_sums.py"),
    Mutation("PackedLayers.layer_of_row", "rows behind the last layer are the first's", "len(_.blocks) - 1", "0", "tests/packed"),
    Mutation("PackedLayers.nonempty", "layers elsewhere are empty here", "_.shard is None", "True", "tests/packed/test_rows.py"),
    Mutation("ArraySpec._per_buffer", "one rate for all leaves of a buffer", "X and len(set(Y)) == 1", "X", "tests/packed/test_array_spec.py"),
    Mutation("ArraySpec._per_buffer", "rates per element are averaged", "jnp.broadcast_to(X, Y)", "jnp.broadcast_to(jnp.mean(X), Y)", PACKED),
    Mutation("ArraySpec.per_array", "columns are not sliced for a shard", "X if _.shard is None or np.ndim(X) == 0 else _.shard.slice(X)", "X", DEVICES + "/test_zero.py"),
    Mutation("accumulate", "a sum for a mean", "jnp.where(_, X, 1)", "jnp.ones_like(X)", "tests/wrappers/test_accumulate.py"),
    Mutation("accumulate", "the sum of a closed window is kept", "apply(_zero_if, X, _)", "X", "tests/wrappers/test_accumulate.py"),
    Mutation("Shard.first_row", "every device has the first rows", "_.num_rows(_)", "0", "tests/packed/test_rows.py"),
    # ---- _inputs
    Mutation("Commit.has_settled", "every array is settled", "_arrays(_).keys() <= _._updates.keys()", "True", SKIP),
    Mutation("Commit.has_kept", "an update is a state", "_.get(id(X), (None, None))", "self._states.get(id(new), (None, self._updates.get(id(new)) is new and old))", HAND_OVER),
    Mutation("Commit.is_finite", "every gradient is finite", "_arrays(_).keys() <= _._finite.keys() | _._updates.keys()", "True", SKIP),
    Mutation("Commit.__init__", "gradients that pass are settled", "self._updates: _ = {}", "self._updates = dict(self._gradients)", SKIP),
    Mutation("Commit.offer", "the norm of some gradients decides for all", "_arrays(_).keys() >= _._gradients.keys()", "True", SKIP),
    Mutation("_has_room", "float16 updates are settled", "bool(jnp.finfo(_).maxexp >= 128)", "True", SKIP),
    Mutation("betas", "betas may be 1", "_checked(X, Y, Z, 1.0)", "_checked(X, Y, Z, math.inf)", MESSAGES),
    Mutation("upper_clamp", "no upper clamp is a clamp at 1", "jnp.inf", "1.0", "tests/everywhere/test_variants.py"),
    Mutation("strong_scalar", "a new value is a new trace", "jnp.result_type(float)", "np.float16 if float(x) < 0.15 else np.float32", FUNCTIONAL),
    Mutation("lists_as_arrays", "a list of numbers is a tree", "X | _", "X", FUNCTIONAL),
    Mutation("_strong_arrays", "weakly typed weights are traced again", "numerics.strong(X)", "X", FUNCTIONAL),
    Mutation("AlignedArguments.replaced", "moments as fine as the weights", "computed_from is None", "True", FUNCTIONAL),
    Mutation("_floating", "integer weights are floats", "_ is not Role.WEIGHTS", "True", FUNCTIONAL + " " + MESSAGES),
    Mutation("AlignedArguments.new_weights", "stop_gradients is ignored", "X if _ else Y", "X if False else Y", FUNCTIONAL),
    Mutation("cast_back", "dtypes of moments drift", "X if X.dtype == _.dtype else X.astype(_.dtype)", "X", FUNCTIONAL),
    Mutation("state._zeros", "moments in half precision", "numerics.real_dtype(X)", "X.real.dtype", MATRIX),
    Mutation("counter", "the counter is not replicated", "jax.device_put(X, _)", "X", DEVICES + "/test_placement.py"),
    Mutation("descent", "updates are not negated", "-X", "X", MATRIX),
    Mutation("Inputs.moments", "moments of missing gradients are zero", "cast_back(X, Y)", "cast_back([n if n is not None or o is None else jnp.zeros_like(o) for n, o in zip(X, Y, strict=True)], Y)", MATRIX),
    Mutation("Inputs._gradients", "a gradient of another shape", "checks.same_shapes(_._replace(leaves=_), _.reference)", "pass", MESSAGES),
    Mutation("inputs._expected", "an integer leaf with a floating gradient", "X if _ else None", "X if False else None", MESSAGES + " " + EDGES),
    Mutation("MomentOptions.read", "the counter overflows", "optax.safe_increment(X)", "X + 1", EDGES + " -k e23"),
    Mutation("rate_of_leaves", "the override of a call is ignored", "X if _ is None else _", "X", MATRIX),
    Mutation("decay_of_leaves", "masks of decay are ignored", "_ and X is not None", "X is not None", MATRIX),
    Mutation("MomentOptions.check", "moments in float16", "jnp.finfo(_).maxexp >= 128", "True", MESSAGES),
    Mutation("rate_of_leaves", "a schedule sees the next step", "_.done", "step.number", MATRIX),
    # ---- _optimizers
    Mutation("first_moment", "the first moment without its complement", "X + scaled(Y, _)", "X + Y", MATRIX),
    Mutation("second_moment", "the second moment of g and not of its square", "numerics.bounded_square(X)", "jnp.abs(numerics.squarable(X))", MATRIX),
    Mutation("delta", "epsilon inside the root", "X = jnp.sqrt(Y); return Z / (X + V).astype(W)", "X = jnp.sqrt(Y + V); return Z / X.astype(W)", MATRIX),
    Mutation("corrections", 'the epsilon of "moments" as it is', "X, _ = Y, numerics.once(_ * _)", "X = Y", MATRIX),
    Mutation("corrections", "Ivy's guard is left out", "X + _", "X", MATRIX),
    Mutation("delta", "0 / 0 after zero gradients", "numerics.positive(X)", "X", MATRIX),
    Mutation("lars._ratio", "no decay in the denominator", "X + _ * _", "X", MATRIX),
    Mutation("lars", "the rate outside of the momentum", "X if inside else ()", "() if inside else X", MATRIX),
    Mutation("_scaled", "Ivy's rule with decay", "scaled_by_trust_ratio(X, Y, Y, ratio=_ivy_ratio, numbers=Z, layers=W, rates=V, scale=U)", "scaled_by_trust_ratio(X, [decay_call(*row) for row in zip_leaves(g, X, lars.weight_decay)], Y, ratio=_ivy_ratio, numbers=Z, layers=W, rates=V, scale=U)", MATRIX),
    Mutation("clamped_ratio", "the ratio is not clamped from above", "X >= _ * Y", "X < 0 * Y", MATRIX),
    Mutation("_updates", "Ivy's rule with decay", "scaled_by_trust_ratio(X, _, Y, ratio=Z, numbers=W, layers=V, rates=U, scale=rules.descent)", "scaled_by_trust_ratio(X, Y, Y, ratio=Z, numbers=W, layers=V, rates=U, scale=rules.descent)", MATRIX),
    Mutation("check_clamps", "clamps in the wrong order are accepted", "not _ <= _", "False", MESSAGES),
    Mutation("_momentum_of_decayed", "decay outside of the momentum", "rules.add_scaled(rules.add_scaled(X, _, _), Y, Z)", "rules.add_scaled(X, Y, Z)", MATRIX),
    # ---- _quantized
    Mutation("encode_unsigned", "a small second moment is stored as 0", "_clamped(1, X, Y)", "_clamped(0, X, Y)", "tests/quantized/test_codes.py"),
    Mutation("_clamped", "codes in int64", "jax.lax.clamp(jnp.int32(X), Y, jnp.int32(Z))", "jax.lax.clamp(X, Y, Z)", "tests/quantized/test_codes.py tests/everywhere/test_surroundings.py"),
    Mutation("_placed", "explicit axes of codes are left to JAX", "on_automatic_axes(X, Blocks(_, _, _), *Y)", "X(*Y)", DEVICES + "/test_eight_bits.py"),
    Mutation("_rounded", "to the nearest", "X >> 32 - _DROPPED", "X >> 31 << _DROPPED - 1", "tests/quantized/test_codes.py"),
    Mutation("scale_of", "a scale that a rounded maximum leaves", "X + ((1 << _DROPPED) - 1)", "X", "tests/quantized/test_codes.py"),
    Mutation("step_keys", "the same bits for each step", "X.astype(jnp.uint32)", "X.astype(jnp.uint32) * 0", "tests/quantized/test_random_bits.py"),
    Mutation("bfloat16.rounded", "bfloat16 to the nearest", "jnp.where(jnp.abs(_) < LARGEST, _ >> _DROPPED, _)", "jnp.uint32(0x8000)", "tests/quantized/test_bfloat16.py"),
    Mutation("codec.of_moments", "second moments have a sign", "UNSIGNED if _ else SIGNED", "SIGNED", "tests/quantized/test_blocks.py"),
    Mutation("encoding.check", "codes of another codec are accepted", "_ not in _", "False", "tests/quantized/test_blocks.py"),
    Mutation("Form.__eq__", "blocks along another axis are the same", "self._unnamed == _", "True", "tests/quantized/test_blocks.py"),
    Mutation("Codec.to_bytes", "the codes of a byte are over each other", "X << _", "X", "tests/quantized/test_codec.py"),
    Mutation("Geometry._along", "the last block along an axis is lost", "self._bounds", "self._bounds[:1]", "tests/quantized/test_codec.py"),
    Mutation("Geometry.of_leaf", "blocks straddle layers", "not _", "True", "tests/quantized/test_encoding.py"),
    Mutation("quantized_buffers._order", "scales of stacked layers out of order", "(*_, *_.layers.within)", "None", "tests/packed/test_quantized_buffers.py"),
    Mutation("_encoder", "codes of a skipped step are kept", "jax.tree.map(_, X, _)", "X", "tests/everywhere/test_eight_bits.py"),
    Mutation("MomentOptions._moment", "a state of another recipe is accepted", "isinstance(_, Blocks) == X", "True", "tests/everywhere/test_forms_in_8_bits.py"),
    # ---- _wrappers
    Mutation("quantized._like", "codes of another dtype are accepted", "not same_kind", "False", "tests/states/test_quantized.py"),
    Mutation("stochastic_rounding", "the counter does not count", "optax.safe_increment(X)", "X", "tests/wrappers/test_stochastic_rounding.py"),
    Mutation("clip._ratio", "small norms are scaled up", "jnp.where(_, X, _) / jnp.where(_, Y, _)", "X / Y", "tests/wrappers/test_clip.py"),
    Mutation("clip._ratio", "an infinite norm clips to 0", "jnp.where(_ == jnp.inf, jnp.full_like(X, jnp.nan), X)", "X * 1", "tests/wrappers/test_clip.py"),
    Mutation("_add_if", "gradients that are not finite are added", "jnp.where(_, X, Y)", "X", "tests/wrappers/test_accumulate.py"),
    Mutation("accumulate", "a window closes a call late", "X >= Y", "X > Y", "tests/wrappers/test_accumulate.py"),
    Mutation("accumulate", "a window without gradients updates", "X & (_ > 0)", "X", "tests/wrappers/test_accumulate.py"),
    Mutation("_works", "steps are not looked at", "all_finite(_, _)", "jnp.asarray(True)", SKIP),
    Mutation("_chosen", "what others compute is not looked at", "_ or any(_ is not None for _ in _)", "False", SKIP),
    Mutation("_works", "new states are not looked at", "_ &= stays_finite([_ for _, _ in _], [_ for _, _ in _], _)", "pass", SKIP),
    Mutation("_works", "new parameters are not looked at", "_ &= stays_finite(parameters.applied(_, _), _, _)", "pass", SKIP),
    Mutation("_next_scale", "the loss scale does not halve", "jnp.maximum(X / 2, 1)", "X", SKIP),
    Mutation("skip_nonfinite", "a mini-batch decides for what follows its window", "X.for_windows() if _ else X", "X", HAND_OVER),
    Mutation("AccumulateState.__jgrad_rejected__", "a lost window is kept", "AccumulateState(_, _, new.skipped, _, _)", "self._replace(skipped=new.skipped)", SKIP),
    Mutation("AccumulateState.__jgrad_rejected__", "a window is lost with a mini-batch", "_ & (_ == 0)", "jnp.asarray(True)", HAND_OVER),
    Mutation("any_says", "only the next state is asked", "any(_)", "_says(state, attribute)", HAND_OVER),
    Mutation("WrapperInputs.follow", "updates of others are followed", "X if _ is not None and X.has_settled(_) else None", "X", HAND_OVER),
    Mutation("_none_of", "the last leaf alone is looked at", "jnp.sort(X)", "X", SKIP),
    Mutation("_stays_finite", "a NaN in a state is finite", "jnp.isfinite(X) | Y", "~jnp.isinf(X) | Y", SKIP),
    Mutation("agreed", "devices do not agree", "jax.lax.pmin(X.astype(jnp.int32), _) == 1", "X", DEVICES),
    Mutation("master_weights", "updates from the rounded weights", "parameters.applied(_, X)", "parameters.applied(jax.tree.map(parameters.wide, params), X)", "tests/wrappers/test_master_weights.py"),
    Mutation("master_weights", "an update beyond float16 is clipped", "jnp.where(jnp.isinf(_), _, X)", "X", "tests/wrappers/test_master_weights.py"),
    Mutation("ema", "parameters before the update are averaged", "parameters.applied(X, Y)", "parameters.applied(X, jax.tree.map(jnp.zeros_like, Y))", "tests/wrappers/test_ema.py"),
    Mutation("_fit", "mixed dtypes of gradients are packed", "len(X) > 1 or Y", "Y", "tests/wrappers/test_pack_small.py"),
    Mutation("pack_small", "the state of another model", "_.is_part_of(_, _)", "True", "tests/wrappers/test_pack_small.py"),
    Mutation("zero", "gradients that JAX summed are accepted", "_ is not None and shard.is_known_to_be_invariant(_, _)", "False", DEVICES + "/test_zero.py"),
    Mutation("zero._sliced", "the rows of the first device", "X.slice", "lambda x: x[: X.num_rows(len(x))]", DEVICES + "/test_zero.py"),
    Mutation("_sharded_further", "buffers are sharded along columns", "X[: 1 if _ else None]", "X[::-1]", DEVICES),
    Mutation("_Shardings._like", "moments of other shapes follow", "X or Y.shape != _.shape", "X", DEVICES),
    Mutation("_Shardings._of_packed", "unpacked leaves are replicated", "None if _ is None else _._leaves[_]", "None", DEVICES),
    Mutation("in_dtypes", "states drift to other dtypes", "X.astype(_.dtype) if checks.is_numeric(_) else X", "X", "tests/wrappers"),
    Mutation("skip_nonfinite", "branch: the update runs always", "choices.branch(_, X, lambda: (_.zeros(), _.inner))", "X()", SKIP),
    Mutation("branch", "an eager branch is taken always", "X if _ else otherwise()", "X", "tests/wrappers/test_accumulate.py"),
    # ---- Muon
    Mutation("newton_schulz._normalized", "muon: squares that overflow", "numerics.scaled(X, 1 / scale)", "X", "tests/muon/test_muon_edges.py"),
    Mutation("newton_schulz._in_chunks", "muon: chunks are written to the first", "jax.lax.dynamic_update_slice_in_dim(X, Y, Z * _, 0)", "jax.lax.dynamic_update_slice_in_dim(X, Y, 0 * Z, 0)", "tests/muon/test_newton_schulz.py"),
    Mutation("newton_schulz._normalized", "muon: the norm of the whole stack", "jnp.sum(X, axis=(1, 2))", "jnp.sum(X)", "tests/muon/test_newton_schulz.py"),
    Mutation("newton_schulz._in_chunks", "muon: the last chunk is left out", "-(-count // each)", "count // each", "tests/muon/test_newton_schulz.py"),
    Mutation("_product", "muon: no conjugate", "X.conj() if _ and jnp.iscomplexobj(X) else X", "X", "tests/muon/test_muon.py"),
    Mutation("MatrixAxes._in_order", "muon: rows are outputs", "min(_.outputs) < min(_.inputs) if _ == _ else _ < _", "True", "tests/muon/test_matrix_axes.py"),
    Mutation("direction.directions", "muon: the momentum is the direction", "_.nesterov", "False", "tests/muon/test_muon.py"),
    Mutation("direction.directions", "muon: momentum of Adam, which clips", "calls(rules.average, X, _, b.value, b.complement)", "calls(adam_of.first_moment, X, mw.old, b.value, b.complement)", "tests/muon/test_muon_edges.py"),
    Mutation("Muon.adam", "muon: Adam corrects the step size", "'moments'", "'step_size'", "tests/muon/test_muon.py"),
    Mutation("direction._normalized", "muon: NorMuon without the norm of before", "numerics.scaled(X, numerics.safe_divide(norm(_), norm(X)))", "X", "tests/muon/test_muon.py"),
    Mutation("_of_both_kinds", "muon: the decay of matrices for all leaves", "_ if _ is None else X", "X", "tests/muon/test_muon.py"),
    Mutation("HiddenMatrices._reason", "muon: layers count as axes", "X - len(_.values)", "X", "tests/muon/test_hidden_matrices.py"),
    Mutation("hidden_matrices._parts", "muon: flat keys are one part", "_BETWEEN.split(X)", "[X]", "tests/muon/test_hidden_matrices.py"),
    Mutation("HiddenMatrices._rows", "muon: a count is a model", "_check_parameters(_, _)", "pass", "tests/inputs/test_injected.py"),
    Mutation("RowOrder.to_shard_order", "muon: shards in the order of segments", "_._is_plain", "True", "tests/packed/test_row_order.py"),
    Mutation("packed_parts.check_whole", "muon: a buffer cuts matrices", "_ > 1 and (_.row_order is None or _.row_order.shards % _)", "False", DEVICES + "/test_muon.py"),
    Mutation("second_shape", "muon: second moments of matrices", "_ is not None and (not _)", "False", "tests/muon/test_muon.py"),
    Mutation("batches.orthogonalized", "muon: an iteration for each leaf", "X[kind]", "X[(*kind, i)]", "tests/muon/test_muon_edges.py"),
    Mutation("Layout._by_buffer", "empty leaves in the order of the tree", "(X, Y.num_blocks, Z)", "(X, Z)", PACKED),
    Mutation("packed_parts._by_share", "muon: matrices of shards are on each device", "sharded_as(X, _.codes if isinstance(_, Blocks) else _)", "X", DEVICES + "/test_packed.py"),
    Mutation("PackedLayers.sum", "explicit axes of rows are left to JAX", "on_automatic_axes(X, _, Y)", "X(Y)", DEVICES + "/test_packed.py"),
    Mutation("matrix_axes._check_whole", "muon: silence inside shard_map", "(X := Y)", "False and (X := Y)", DEVICES + "/test_muon.py"),
    Mutation("unknown_axes", "muon: pmap without a name", "not str(_).startswith(_WITHOUT_NAME)", "True", DEVICES + "/test_muon.py"),
    Mutation("_weight", "the weight of the rate before", "jnp.maximum(_, X)", "X", "tests/wrappers/test_schedule_free.py"),
    Mutation("_weight", "weights overflow", "jnp.clip(_ * _, 1 / _LARGEST, _LARGEST)", "step**by_step * largest**by_rate", "tests/wrappers/test_schedule_free.py"),
    Mutation("schedule_free", "z of a leaf without a gradient is averaged", "None if g is None else X", "X", "tests/wrappers/test_schedule_free.py"),
    # ---- _ivy
    Mutation("execute_with_gradients", "gradients stay in the returned value", "X if _ else stop_gradient(X)", "X", "tests/ivy"),
    Mutation("_locate", "negative positions are not found", "-len(_)", "0", "tests/ivy"),
    Mutation("_combined", "a value that the dtype cannot hold", "_kind(_) > _kind(_)", "False", "tests/ivy"),
]  # fmt: skip
