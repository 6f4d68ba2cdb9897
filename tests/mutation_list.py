"""Mutations of the library, in the order of its folders: every rule, norm, check, wrapper, layout.

The first four entries of each: file, what is broken, the text, the text in its place. The last:
where to look for a test that notices, before the whole suite runs.
"""

from typing import NamedTuple

MATRIX = "tests/everywhere/test_matrix.py"
MESSAGES = "tests/everywhere/test_messages.py"
EDGES = "tests/everywhere/test_sharp_edges.py"
FUNCTIONAL = "tests/inputs/test_functional.py"
NORMS = "tests/layers/test_norms.py"
PACKED = "tests/packed/test_optimizers.py tests/packed/test_packing.py"
DEVICES = "tests/multi_device"
SKIP = "tests/wrappers/test_skip_nonfinite.py"


class Mutation(NamedTuple):
    """A text of a file, and what stands in its place.

    Attributes:
      file: in `jgrad/`.
      name: what is broken.
      old: stands once in the file.
      new: the broken text.
      near: arguments of pytest, the tests that are run first.
    """

    file: str
    name: str
    old: str
    new: str
    near: str


MUTATIONS = [
    # ---- _trees
    Mutation("_trees/trees.py", "a prefix gives each leaf once", "for _ in range(count)]", "for _ in range(min(count, 1))]", "tests/trees"),
    Mutation("_trees/trees.py", "None is no leaf", "return jax.tree.flatten(tree, is_leaf=is_leaf)", "return jax.tree.flatten(tree)", "tests/trees"),
    Mutation("_trees/trees.py", "a tree that is coarser in one place is the finest", "if all(s == structure or is_prefix(t, tree)", "if any(s == structure or is_prefix(t, tree)", "tests/trees"),
    Mutation("_trees/trees.py", "a tree of rates is called", "not (is_tree and is_prefix(x, params))", "True", "tests/trees"),
    Mutation("_trees/trees.py", "a schedule that is a tree is not called", "not (is_tree and is_prefix(x, params))", "not is_tree", "tests/trees"),
    Mutation("_inputs/pair.py", "Python floats without a gradient become arrays", "(known and checks.is_number(p))", "False", "tests/inputs/test_models.py"),
    Mutation("_inputs/update.py", "an array in the place of codes", "if n is not None and is_blocks(o) and not is_blocks(n):", "if False:", "tests/inputs/test_moments.py"),
    Mutation("_inputs/options.py", "momentum above 1", 'values.in_range(function, "momentum", as_number, low=0.0, high=1.0)', "pass", MESSAGES),
    Mutation("_inputs/options.py", "a mask that a count made", "if arrays <= sum(map(checks.is_number, options)):", "if True:", "tests/inputs/test_injected.py"),
    Mutation("_inputs/aligned.py", "the first argument is the finest", "None if aligned is None else names[aligned.finest]", "names[0]", FUNCTIONAL),
    Mutation("_wrappers/pack_small.py", "a part of the parameters is another model", "if span is None and inputs.g[i] is None:", "if False:", "tests/inputs/test_models.py"),
    Mutation("_wrappers/ema.py", "what init did not see is averaged", "None if o is None else x for x, o in pairs", "x for x, o in pairs", "tests/inputs/test_models.py"),
    Mutation("_inputs/pair.py", "variables are no parameters", "params = checks.values_of(params)", "params = params", "tests/inputs/test_models.py"),
    Mutation("_trees/checks.py", "shapes are not compared", "if x is not None and r is not None\n    ]", "if x is not None and r is not None and False\n    ]", MESSAGES),
    Mutation("_trees/checks.py", "the path is left out of messages", 'return f" at {path}" if path else ""', 'return ""', MESSAGES),
    Mutation("_trees/checks.py", "what broadcasts may enlarge a parameter", "return result == to or", "return True or", MESSAGES),
    Mutation("_trees/checks.py", "a real gradient beside a complex parameter", "return bool(jnp.iscomplexobj(x) == jnp.iscomplexobj(reference))", "return True", MESSAGES),
    Mutation("_trees/checks.py", "a bool is a number", "and not isinstance(x, bool)", "", MESSAGES),
    Mutation("_trees/values.py", "the end of a range belongs to it", "not low <= x < high", "not low <= x <= high", MESSAGES),
    Mutation("_trees/values.py", "numbers that float32 cannot hold", "abs(x) > float(jnp.finfo(dtype).max)", "False", MESSAGES),
    Mutation("_trees/values.py", "out= is ignored", "if out is not None:", "if False:", MESSAGES),
    Mutation("_trees/values.py", "what is true in a condition is a flag", "if not isinstance(value, (bool, np.bool_)):", "if False:", MESSAGES),
    Mutation("_trees/host_memory.py", "what lay on the host stays on the device", "return to_host(f(to_device(tree)))", "return f(to_device(tree))", "tests/wrappers/test_offload.py"),
    # ---- _arithmetic
    Mutation("_arithmetic/numerics.py", "1 - beta^t as it is written", "return -jnp.expm1(step * log_beta)", "return 1 - jnp.exp(step * log_beta)", "tests/arithmetic"),
    Mutation("_arithmetic/numerics.py", "the root has an infinite slope at 0", "zero = x == 0\n    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(", "zero = x < 0\n    return jnp.where(zero, jnp.zeros_like(x), jnp.sqrt(", "tests/arithmetic"),
    Mutation("_arithmetic/numerics.py", "squares overflow", "maxexp // 2 - 1)", "maxexp - 1)", "tests/arithmetic"),
    Mutation("_arithmetic/numerics.py", "saturated hides infinities", "return jnp.where(finite, clipped(x, float(jnp.finfo(x.dtype).max)), x)", "return clipped(x, float(jnp.finfo(x.dtype).max))", "tests/arithmetic"),
    Mutation("_arithmetic/numerics.py", "1 - beta from a rounded beta", "return BetaForms(beta, 1.0 - beta, ", "return BetaForms(beta, 1.0 - np.float32(beta), ", MATRIX),
    Mutation("_arithmetic/numerics.py", "the squared modulus of the real part alone", "x.real * x.real + x.imag * x.imag", "x.real * x.real", "tests/arithmetic"),
    Mutation("_arithmetic/numerics.py", "arithmetic in half precision", "return np.dtype(np.float64 if wide else np.float32)", "return np.dtype(np.float64 if wide else arrays[0].real.dtype)", MATRIX),
    Mutation("_arithmetic/numerics.py", "zeros without the sharding", "return jnp.where(x == x, zero, zero)", "return jnp.broadcast_to(zero, x.shape)", DEVICES + "/test_placement.py"),
    Mutation("_arithmetic/numerics.py", "second moments overflow", "return jnp.minimum(square, jnp.asarray(largest, square.dtype))", "return square", "tests/arithmetic tests/everywhere/test_sharp_edges.py"),
    Mutation("_arithmetic/numerics.py", "a schedule is computed for each leaf", "return x / jax.lax.stop_gradient(one)", "return x", "tests/everywhere/test_recipes.py -k operations"),
    Mutation("_arithmetic/one_pass.py", "moments are computed twice without the flag", 'return _flag_is_set() and', "return", "tests/arithmetic/test_one_pass.py"),
    Mutation("_inputs/store.py", "moments are computed once under the flag", "elif one_pass.is_chosen():", "elif False:", "tests/arithmetic/test_one_pass.py"),
    Mutation("_arithmetic/leafwise.py", "results of a batch in another order", "indices, rows = zip(*members[start : start + _TOGETHER], strict=True)", "indices, rows = zip(*members[start : start + _TOGETHER], strict=True)\n            indices = indices[::-1]", "tests/arithmetic"),
    Mutation("_arithmetic/rules.py", "momentum and decay without their factors", "direction + numerics.addable(scaled(x, factor))", "direction + numerics.addable(x)", MATRIX),
    Mutation("_arithmetic/rules.py", "momentum and decay overflow", "direction + numerics.addable(scaled(x, factor))", "direction + scaled(x, factor)", "tests/arithmetic"),
    Mutation("_arithmetic/rules.py", "momentum and decay have the other sign", "direction + numerics.addable(scaled(x, factor))", "direction - numerics.addable(scaled(x, factor))", MATRIX),
    Mutation("_arithmetic/rules.py", "an update that is not committed is kept", "return jnp.where(commit, numerics.clipped(new, largest), old)", "return numerics.clipped(new, largest)", SKIP),
    Mutation("_arithmetic/rules.py", "a committed moment overflows", "return jnp.where(commit, numerics.clipped(new, largest), old)", "return jnp.where(commit, new, old)", SKIP),
    Mutation("_arithmetic/rules.py", "a committed update overflows", "numerics.clipped(u, largest), jnp.zeros_like(u)", "u, jnp.zeros_like(u)", SKIP),
    Mutation("_arithmetic/rules.py", "an update that is not committed is no zero", "return jnp.where(commit, numerics.clipped(u, largest), jnp.zeros_like(u))", "return numerics.clipped(u, largest)", SKIP),
    Mutation("_arithmetic/rules.py", "an average with swapped weights", "scaled(old, beta) + scaled(x, complement)", "scaled(x, beta) + scaled(old, complement)", "tests/wrappers/test_ema.py"),
    Mutation("_arithmetic/rules.py", "weights ascend", "return w + update", "return w - update", FUNCTIONAL),
    Mutation("_arithmetic/apply.py", "Nesterov's form is heavy-ball", "    if look_ahead is None:\n", "    if True:\n", MATRIX),
    Mutation("_arithmetic/apply.py", "a decay of 0 is compiled", "return isinstance(number, (int, float)) and number == 0", "return False", MATRIX),
    # ---- _gradients
    Mutation("_gradients/grad.py", "func is called twice", "(_, output), gradient = jax.value", "scalar(arguments.leaves)\n        (_, output), gradient = jax.value", "tests/gradients"),
    Mutation("_gradients/arguments.py", "tangents have no place on a mesh", "if not isinstance(x, jax.core.Tracer):", "if True:", "tests/gradients/test_surroundings.py"),
    Mutation("_gradients/grad.py", "hvp by another vector", "(arguments.tangents(tangents),)", "(arguments.leaves,)", "tests/gradients"),
    Mutation("_gradients/grad.py", "the gradient of a gradient is an error", "is_gradient = getattr(func, _GRADIENT, None) is func", "is_gradient = False", "tests/gradients"),
    Mutation("_gradients/jac.py", "blocks of columns are not transposed", "jnp.moveaxis(y[part], 0, -1).reshape(", "y[part].reshape(", "tests/gradients"),
    Mutation("_gradients/jac.py", "always reverse mode", "fewer_inputs = _size(inputs) < _size(leaves)", "fewer_inputs = False", "tests/gradients"),
    Mutation("_gradients/arguments.py", "an argument twice", "if len(set(self._chosen)) < len(self._chosen):", "if False:", "tests/gradients"),
    # ---- _layers
    Mutation("_layers/layer_axes.py", "layers of a stack are one", "axis not in self.stacked)", "True)", "tests/layers"),
    Mutation("_layers/layer_axes.py", "negative axes as they are", "tuple(sorted(axis % len(shape) for axis in axes if inside))", "tuple(sorted(axis for axis in axes if inside))", "tests/layers tests/multi_device/test_layers.py"),
    Mutation("_layers/layer_axes.py", "a PartitionSpec without its tuples", "for name in part if name is not None]", "for name in part[:1] if name is not None]", "tests/layers"),
    Mutation("_layers/sums.py", "sums that overflowed are not scaled", "return jnp.where(total == jnp.inf, down, scale)", "return scale", NORMS),
    Mutation("_layers/sums.py", "tiny sums are scaled once", "jnp.where(total < tiny, far_up, jnp.where", "jnp.where(total < 0, far_up, jnp.where", NORMS),
    Mutation("_layers/norms.py", "norms are never rescaled", "norms = jax.lax.cond(unusual, rescaled,", "norms = jax.lax.cond(unusual & False, rescaled,", NORMS),
    Mutation("_layers/norms.py", "other layers change a norm", "jnp.where(scale == 1, total, rescaled)", "rescaled", NORMS),
    Mutation("_layers/norms.py", "norms of shards are not combined", "_over_devices(x, axes) if axes else x", "x", DEVICES + "/test_layers.py"),
    Mutation("_layers/norms.py", "an infinite norm counts as finite", "bound = jnp.where(self.mantissa == jnp.inf, self.mantissa, largest)", "bound = largest", NORMS),
    Mutation("_layers/norms.py", "batches of other mesh axes are joined", "if full or axes.mesh_axes != first.mesh_axes:", "if full:", DEVICES + "/test_layers.py"),
    Mutation("_layers/norms.py", "stacks share a batch", "return bool(axes.stacked) and not axes.mesh_axes", "return False", DEVICES + "/test_collectives.py"),
    Mutation("_trees/shardings.py", "leaves are stacked on a mesh", "return any(kind != AxisType.Manual", "return any(kind != kind", DEVICES + "/test_collectives.py"),
    Mutation("_layers/norms.py", "the norm of all is never rescaled", "return jax.lax.cond(unusual, rescaled,", "return jax.lax.cond(unusual & False, rescaled,", "tests/wrappers/test_clip.py"),
    Mutation("_layers/norms.py", "the norm of all is rescaled one way", "return ScaledNorm(numerics.safe_sqrt(total(scale)), 1 / scale)", "return ScaledNorm(numerics.safe_sqrt(total(scale)), jnp.ones_like(scale))", "tests/wrappers/test_clip.py"),
    Mutation("_layers/norms.py", "an eager call leaves the last arrays out", "range(0, count, _EAGER)]", "range(0, count - _EAGER + 1, _EAGER)]", NORMS),
    Mutation("_layers/ratios.py", "a zero norm has no ratio of 1", "jnp.where((a == 0) | (b == 0), jnp.ones_like(otherwise), otherwise)", "otherwise", MATRIX),
    Mutation("_layers/ratios.py", "the slope of a root of a quotient", "0.5 * root * (da / a - db / b)", "0.5 * root * (da / a + db / b)", "tests/everywhere/test_meta_gradients.py " + FUNCTIONAL),
    Mutation("_layers/ratios.py", "the slope of a quotient", "(da - ratio * db) / b", "(da + ratio * db) / b", "tests/everywhere/test_meta_gradients.py " + FUNCTIONAL),
    Mutation("_layers/trust.py", "masked leaves have a ratio", "if x is not None and np.any(mask[i])]", "if x is not None]", MATRIX),
    Mutation("_layers/trust.py", "masks in a buffer are ignored", "if isinstance(mask[i], np.ndarray):", "if False:", PACKED),
    # ---- _packed
    Mutation("_packed/blocks.py", "stacked layers in another order", "x = jax.lax.transpose(x, (*layers.stacked, *layers.within))", "x = jax.lax.transpose(x, (*layers.within, *layers.stacked))", "tests/packed"),
    Mutation("_packed/layouts.py", "max_size is ignored", "max_size is not None and math.prod(x.shape) > max_size", "False", "tests/packed/test_layouts.py"),
    Mutation("_packed/layouts.py", "multiple_of is ignored", "rows = -(-end // multiple_of) * multiple_of", "rows = end", "tests/packed/test_layouts.py"),
    Mutation("_packed/layouts.py", "pickles lose the axes of stacks", "dataclasses.astuple(span.layers)", "(span.layers.shape,)", "tests/packed/test_layouts.py"),
    Mutation("_packed/packing.py", "padding is not zero", "jnp.zeros((rows * width,), dtype)", "jnp.ones((rows * width,), dtype)", "tests/packed"),
    Mutation("_packed/packing.py", "like: dtypes are mixed", "if x.dtype != dtype:", "if False:", "tests/packed"),
    Mutation("_packed/splitting.py", "pieces in two turns lose one", "min(step, end - i))", "step)", "tests/packed/test_splitting.py"),
    Mutation("_packed/splitting.py", "split outside of a branch", "return jax.lax.platform_dependent(vectors, cpu=in_branch, default=plain)", "return plain(vectors)", "tests/packed/test_splitting.py"),
    Mutation("_packed/rows.py", "the last chunk is dropped", "parts[-1, _ROWS - left :]", "parts[-1, :left]", "tests/packed/test_row_sums.py"),
    Mutation("_packed/rows.py", "rows behind the last layer are the first's", "constant_values=len(self.blocks) - 1", "constant_values=0", "tests/packed"),
    Mutation("_packed/rows.py", "layers elsewhere are empty here", "if self.shard is None:\n            return np.array(self.blocks) > 0", "if True:\n            return np.array(self.blocks) > 0", "tests/packed/test_rows.py"),
    Mutation("_packed/arrays.py", "one rate for all leaves of a buffer", "all(checks.is_number(x) for x in own) and len(set(own)) == 1", "all(checks.is_number(x) for x in own)", "tests/packed/test_arrays.py"),
    Mutation("_packed/arrays.py", "rates per element are averaged", "jnp.broadcast_to(jnp.asarray(x, dtype=float), span.layers.shape)", "jnp.broadcast_to(jnp.mean(jnp.asarray(x, dtype=float)), span.layers.shape)", PACKED),
    Mutation("_packed/arrays.py", "columns are not sliced for a shard", "return entry if self.shard is None or np.ndim(entry) == 0 else self.shard.slice(entry)", "return entry", DEVICES + "/test_zero.py"),
    Mutation("_wrappers/accumulate.py", "a sum for a mean", "divisor = jnp.where(close, count, 1).astype(float)", "divisor = jnp.ones_like(count).astype(float)", "tests/wrappers/test_accumulate.py"),
    Mutation("_wrappers/accumulate.py", "the sum of a closed window is kept", "added = apply(_zero_if, total, closed)", "added = total", "tests/wrappers/test_accumulate.py"),
    Mutation("_packed/shard.py", "every device has the first rows", "return jax.lax.axis_index(self.axes) * self.num_rows(rows)", "return jax.lax.axis_index(self.axes) * 0", "tests/packed/test_rows.py"),
    # ---- _inputs
    Mutation("_inputs/commit.py", "every array is settled", "return _arrays(tree).keys() <= self._settled.keys()", "return True", SKIP),
    Mutation("_inputs/commit.py", "every gradient is finite", "return _arrays(tree).keys() <= self._finite.keys() | self._settled.keys()", "return True", SKIP),
    Mutation("_inputs/commit.py", "gradients that pass are settled", "self._settled: dict[int, Any] = {}", "self._settled = dict(self._gradients)", SKIP),
    Mutation("_inputs/commit.py", "the norm of some gradients decides for all", "_arrays(tree).keys() >= self._gradients.keys()", "True", SKIP),
    Mutation("_inputs/update.py", "float16 updates are settled", "return bool(jnp.finfo(dtype).maxexp >= 128)", "return True", SKIP),
    Mutation("_inputs/numbers.py", "betas may be 1", 'values.in_range(function, name, tree, low=0.0, high=1.0)', 'values.in_range(function, name, tree, low=0.0)', MESSAGES),
    Mutation("_inputs/numbers.py", "no upper clamp is a clamp at 1", "jnp.asarray(jnp.inf) if largest is None", "jnp.asarray(1.0) if largest is None", "tests/everywhere/test_variants.py"),
    Mutation("_inputs/numbers.py", "a new value is a new trace", "return np.asarray(float(x), jnp.result_type(float)) if checks.is_number(x) else x", "return np.asarray(float(x), np.float16 if float(x) < 0.15 else np.float32) if checks.is_number(x) else x", FUNCTIONAL),
    Mutation("_inputs/functional.py", "a list of numbers is a tree", "return named | as_arrays", "return named", FUNCTIONAL),
    Mutation("_inputs/functional.py", "weakly typed weights are traced again", "numbers.strong_scalar(x) if checks.is_number(x) else numerics.strong(x)", "numbers.strong_scalar(x) if checks.is_number(x) else x", FUNCTIONAL),
    Mutation("_inputs/aligned.py", "moments as fine as the weights", "finest = None if computed_from is None else", "finest = None if True else", FUNCTIONAL),
    Mutation("_inputs/aligned.py", "integer weights are floats", "and role is not Role.WEIGHTS:", "and True:", FUNCTIONAL + " " + MESSAGES),
    Mutation("_inputs/aligned.py", "stop_gradients is ignored", "if stop_gradients else new", "if False else new", FUNCTIONAL),
    Mutation("_arithmetic/apply.py", "dtypes of moments drift", "y if x is None else x if x.dtype == y.dtype else x.astype(y.dtype) for x, y in pairs", "y if x is None else x for x, y in pairs", FUNCTIONAL),
    Mutation("_inputs/state.py", "moments in half precision", "numerics.real_dtype(p) if dtype is None", "p.real.dtype if dtype is None", MATRIX),
    Mutation("_inputs/state.py", "the counter is not replicated", "return jax.device_put(x, NamedSharding(sharding.mesh, PartitionSpec()))", "return x", DEVICES + "/test_placement.py"),
    Mutation("_arithmetic/rules.py", "updates are not negated", "(*others, -last), direction", "(*others, last), direction", MATRIX),
    Mutation("_inputs/update.py", "moments of missing gradients are zero", "cast_back(new, old)", "cast_back([y if x is not None or y is None else jnp.zeros_like(y) for x, y in zip(new, old, strict=True)], old)", MATRIX),
    Mutation("_inputs/update.py", "a gradient of another shape", "checks.same_shapes(arg._replace(leaves=gradients), self.reference)", "pass", MESSAGES),
    Mutation("_inputs/update.py", "an integer leaf with a floating gradient", "if floating else None", "if False else None", MESSAGES + " " + EDGES),
    Mutation("_inputs/update.py", "the counter overflows", "optax.safe_increment(step)", "step + 1", EDGES + " -k e23"),
    Mutation("_inputs/options.py", "the override of a call is ignored", "learning_rate if override is None else override", "learning_rate", MATRIX),
    Mutation("_inputs/options.py", "masks of decay are ignored", "x if own and x is not None else 0.0", "x if x is not None else 0.0", MATRIX),
    Mutation("_inputs/moments.py", "moments in float16", "jnp.finfo(dtype).maxexp >= 128", "True", MESSAGES),
    Mutation("_inputs/transformation.py", "a schedule sees the next step", "learning_rate, state.step)", "learning_rate, old.step)", MATRIX),
    # ---- _optimizers
    Mutation("_optimizers/adam.py", "the first moment without its complement", "scaled(mw, beta) + scaled(numerics.squarable(g), complement)", "scaled(mw, beta) + numerics.squarable(g)", MATRIX),
    Mutation("_optimizers/adam.py", "the second moment of g and not of its square", "numerics.bounded_square(g)", "jnp.abs(numerics.squarable(g))", MATRIX),
    Mutation("_optimizers/adam.py", "epsilon inside the root", "root = jnp.sqrt(numerics.positive(vw))\n    return scaled(mw, alpha) / (root + epsilon)", "root = jnp.sqrt(numerics.positive(vw) + epsilon)\n    return scaled(mw, alpha) / (root)", MATRIX),
    Mutation("_optimizers/adam.py", "the epsilon of \"moments\" as it is", "divisor, epsilon = c1, numerics.once(root * epsilon)", "divisor = c1", MATRIX),
    Mutation("_optimizers/adam.py", "Ivy's guard is left out", "divisor = c1 + epsilon", "divisor = c1", MATRIX),
    Mutation("_optimizers/adam.py", "0 / 0 after zero gradients", "jnp.sqrt(numerics.positive(vw))", "jnp.sqrt(vw)", MATRIX),
    Mutation("_optimizers/lars.py", "no decay in the denominator", "g_norm + decay * w_norm + epsilon", "g_norm + epsilon", MATRIX),
    Mutation("_optimizers/lars.py", "the rate outside of the momentum", "rates=(rates,) if inside else (),", "rates=() if inside else (rates,),", MATRIX),
    Mutation("_optimizers/lars.py", "Ivy's rule with decay", "gradients,\n            gradients,\n            ratio=_ivy_ratio", "[decay_call(*row) for row in side_by_side(g, w, lars.weight_decay)],\n            gradients,\n            ratio=_ivy_ratio", MATRIX),
    Mutation("_optimizers/trust_ratio.py", "the ratio is not clamped from above", "above, below = w_norm >= largest * u_norm,", "above, below = w_norm < 0 * u_norm,", MATRIX),
    Mutation("_optimizers/lamb.py", "Ivy's rule with decay", "        deltas,\n        decayed,\n        ratio", "        decayed,\n        decayed,\n        ratio", MATRIX),
    Mutation("_optimizers/trust_ratio.py", "clamps in the wrong order are accepted", "and not smallest <= largest:", "and False:", MESSAGES),
    Mutation("_optimizers/gradient_descent.py", "decay outside of the momentum", "rules.add_scaled(rules.add_scaled(g, w, weight_decay), mw, decay)", "rules.add_scaled(g, mw, decay)", MATRIX),
    # ---- _quantized
    Mutation("_quantized/codes.py", "a small second moment is stored as 0", "_clamped(1, code, 255)", "_clamped(0, code, 255)", "tests/quantized/test_codes.py"),
    Mutation("_quantized/codes.py", "codes in int64", "jax.lax.clamp(jnp.int32(low), code, jnp.int32(high))", "jax.lax.clamp(low, code, high)", "tests/quantized/test_codes.py tests/everywhere/test_surroundings.py"),
    Mutation("_quantized/encoding.py", "explicit axes of codes are left to JAX", "return on_automatic_axes(make, Blocks(place, of_scale, own.form(codec)), *args)", "return make(*args)", DEVICES + "/test_eight_bits.py"),
    Mutation("_quantized/codes.py", "to the nearest", "(random >> (32 - _DROPPED))", "((random >> 31) << (_DROPPED - 1))", "tests/quantized/test_codes.py"),
    Mutation("_quantized/codes.py", "a scale that a rounded maximum leaves", "exponent = (largest + ((1 << _DROPPED) - 1)) & _INFINITY", "exponent = largest & _INFINITY", "tests/quantized/test_codes.py"),
    Mutation("_quantized/random_bits.py", "the same bits for each step", "first = _mixed(step.astype(jnp.uint32))", "first = _mixed(step.astype(jnp.uint32) * 0)", "tests/quantized/test_random_bits.py"),
    Mutation("_quantized/bfloat16.py", "bfloat16 to the nearest", "jnp.where(jnp.abs(x) < LARGEST, random >> _DROPPED, jnp.uint32(0))", "jnp.uint32(0x8000)", "tests/quantized/test_bfloat16.py"),
    Mutation("_quantized/geometry.py", "blocks straddle layers", "        if not stacked:\n            return cls", "        if True:\n            return cls", "tests/quantized/test_encoding.py"),
    Mutation("_packed/quantized_buffers.py", "scales of stacked layers out of order", "return (*stacked, *span.layers.within)", "return None", "tests/packed/test_quantized_buffers.py"),
    Mutation("_inputs/store.py", "codes of a skipped step are kept", "jax.tree.map(functools.partial(jnp.where, flag), new, old)", "new", "tests/everywhere/test_eight_bits.py"),
    Mutation("_inputs/moments.py", "a state of another recipe is accepted", "is_blocks(x) == expected[i]", "True", "tests/everywhere/test_forms_in_8_bits.py"),
    # ---- _wrappers
    Mutation("_wrappers/quantized.py", "codes of another dtype are accepted", "if not same_kind:", "if False:", "tests/wrappers/test_quantized.py"),
    Mutation("_wrappers/stochastic_rounding.py", "the counter does not count", "step = optax.safe_increment(_counter(state.step))", "step = _counter(state.step)", "tests/wrappers/test_stochastic_rounding.py"),
    Mutation("_wrappers/clip.py", "small norms are scaled up", "factor = jnp.where(above, root, one) / jnp.where(above, jnp.sqrt(scale), one)", "factor = root / jnp.sqrt(scale)", "tests/wrappers/test_clip.py"),
    Mutation("_wrappers/clip.py", "an infinite norm clips to 0", "jnp.where(mantissa == jnp.inf, jnp.full_like(root, jnp.nan), root)", "root * 1", "tests/wrappers/test_clip.py"),
    Mutation("_wrappers/accumulate.py", "a sum for a mean", "divisor = jnp.where(close, count, 1).astype(float)", "divisor = jnp.ones_like(count).astype(float)", "tests/wrappers/test_accumulate.py"),
    Mutation("_wrappers/accumulate.py", "the sum of a closed window is kept", "added = apply(_zero_if, total, closed)", "added = total", "tests/wrappers/test_accumulate.py"),
    Mutation("_wrappers/accumulate.py", "gradients that are not finite are added", "jnp.where(use, numerics.saturated(total + g, total, g), total)", "numerics.saturated(total + g, total, g)", "tests/wrappers/test_accumulate.py"),
    Mutation("_wrappers/accumulate.py", "a window closes a call late", "emit = mini_step >= every", "emit = mini_step > every", "tests/wrappers/test_accumulate.py"),
    Mutation("_wrappers/accumulate.py", "a window without gradients updates", "emit & (count > 0)", "emit", "tests/wrappers/test_accumulate.py"),
    Mutation("_wrappers/skip_nonfinite.py", "steps are not looked at", "works = all_finite(steps, mesh_axes)", "works = jnp.asarray(True)", SKIP),
    Mutation("_wrappers/skip_nonfinite.py", "what others compute is not looked at", "if states or any(u is not None for u in unknown):", "if False:", SKIP),
    Mutation("_wrappers/skip_nonfinite.py", "new states are not looked at", "    works &= stays_finite([n for n, _ in states], [o for _, o in states], mesh_axes)\n", "", SKIP),
    Mutation("_wrappers/skip_nonfinite.py", "new parameters are not looked at", "works &= stays_finite(wrapped.applied(params, steps), params, mesh_axes)", "pass", SKIP),
    Mutation("_wrappers/skip_nonfinite.py", "the loss scale does not halve", "jnp.maximum(scale / 2, 1)", "scale", SKIP),
    Mutation("_wrappers/skip_nonfinite.py", "a lost window is kept", "use, old = works, without_window(old)._replace(skipped=new.skipped)", "use, old = works, old._replace(skipped=new.skipped)", SKIP),
    Mutation("_wrappers/finite.py", "the last leaf alone is looked at", "return jnp.sort(faults)[-1] == 0", "return faults[-1] == 0", SKIP),
    Mutation("_wrappers/finite.py", "a NaN in a state is finite", "jnp.isfinite(new) | ~jnp.isfinite(old)", "~jnp.isinf(new) | ~jnp.isfinite(old)", SKIP),
    Mutation("_wrappers/finite.py", "devices do not agree", "jax.lax.pmin(flag.astype(jnp.int32), mesh_axes) == 1", "flag", DEVICES),
    Mutation("_wrappers/master_weights.py", "updates from the rounded weights", "wrapped.applied(master, steps)", "wrapped.applied(jax.tree.map(wrapped.wide, params), steps)", "tests/wrappers/test_master_weights.py"),
    Mutation("_wrappers/master_weights.py", "an update beyond float16 is clipped", "jnp.where(jnp.isinf(rounded), far, near)", "near", "tests/wrappers/test_master_weights.py"),
    Mutation("_wrappers/ema.py", "parameters before the update are averaged", "wrapped.applied(params, updates)", "wrapped.applied(params, jax.tree.map(jnp.zeros_like, updates))", "tests/wrappers/test_ema.py"),
    Mutation("_wrappers/pack_small.py", "mixed dtypes of gradients are packed", "len(dtypes) > 1 or None in dtypes", "None in dtypes", "tests/wrappers/test_pack_small.py"),
    Mutation("_wrappers/pack_small.py", "the state of another model", "elif layout.is_part_of(old):", "elif True:", "tests/wrappers/test_pack_small.py"),
    Mutation("_wrappers/zero.py", "gradients that JAX summed are accepted", "if g is not None and shard.is_known_to_be_invariant(g, own):", "if False:", DEVICES + "/test_zero.py"),
    Mutation("_wrappers/zero.py", "the rows of the first device", "_with_shard(trees.map_leaves(own.slice, params), own)", "_with_shard(trees.map_leaves(lambda x: x[: own.num_rows(len(x))], params), own)", DEVICES + "/test_zero.py"),
    Mutation("_wrappers/state_shardings.py", "buffers are sharded along columns", "[: 1 if rows_only else None]", "[::-1]", DEVICES),
    Mutation("_wrappers/state_shardings.py", "moments of other shapes follow", "followed is None or followed.shape != x.shape", "followed is None", DEVICES),
    Mutation("_wrappers/state_shardings.py", "unpacked leaves are replicated", "followed = None if leaf is None else self._leaves[leaf]", "followed = None", DEVICES),
    Mutation("_wrappers/wrapped.py", "states drift to other dtypes", "n.astype(o.dtype) if checks.is_numeric(o) else n", "n", "tests/wrappers"),
    Mutation("_wrappers/skip_nonfinite.py", "branch: the update runs always", "wrapped.branch(finite, take, lambda: (inputs.zeros(), state.inner))", "take()", SKIP),
    Mutation("_wrappers/wrapped.py", "an eager branch is taken always", "return then() if use else otherwise()", "return then()", "tests/wrappers/test_accumulate.py"),
    # ---- Muon
    Mutation("_layers/newton_schulz.py", "muon: squares that overflow", "x = numerics.scaled(x, 1 / scale)", "x = x", "tests/optimizers/test_muon_edges.py"),
    Mutation("_layers/newton_schulz.py", "muon: chunks are written to the first", "new, i * each, 0)", "new, 0 * i, 0)", "tests/layers/test_newton_schulz.py"),
    Mutation("_layers/newton_schulz.py", "muon: the norm of the whole stack", "LayerAxes(x.shape, stacked=(0,))", "LayerAxes(x.shape)", "tests/layers/test_newton_schulz.py"),
    Mutation("_layers/newton_schulz.py", "muon: the last chunk is left out", "chunks = -(-count // each)\n    missing", "chunks = count // each\n    missing", "tests/layers/test_newton_schulz.py"),
    Mutation("_layers/newton_schulz.py", "muon: no conjugate", "y = y.conj() if adjoint and jnp.iscomplexobj(y) else y", "y = y", "tests/optimizers/test_muon.py"),
    Mutation("_layers/matrix_axes.py", "muon: rows are outputs", "rows_are_outputs = min(self.outputs) < min(self.inputs) if out == into else out < into", "rows_are_outputs = True", "tests/layers/test_matrix_axes.py"),
    Mutation("_optimizers/muon_direction.py", "muon: the momentum is the direction", "if muon.nesterov:", "if False:", "tests/optimizers/test_muon.py"),
    Mutation("_optimizers/muon_direction.py", "muon: momentum of Adam, which clips", "kept(apply(rules.average, matrices, mw, beta.value", "kept(apply(adam_of.first_moment, matrices, mw, beta.value", "tests/optimizers/test_muon_edges.py"),
    Mutation("_optimizers/muon_direction.py", "muon: Adam corrects the step size", 'bias_correction="moments"', 'bias_correction="step_size"', "tests/optimizers/test_muon.py"),
    Mutation("_optimizers/muon_direction.py", "muon: NorMuon without the norm of before", "numerics.scaled(new, numerics.safe_divide(norm(x), norm(new)))", "new", "tests/optimizers/test_muon.py"),
    Mutation("_optimizers/muon.py", "muon: the decay of matrices for all leaves", "return [y if own is None else x for x, y, own in rows]", "return [x for x, y, own in rows]", "tests/optimizers/test_muon.py"),
    Mutation("_optimizers/hidden_matrices.py", "muon: layers count as axes", "rank = jnp.ndim(x) - len(axes.values)", "rank = jnp.ndim(x)", "tests/optimizers/test_hidden_matrices.py"),
    Mutation("_optimizers/hidden_matrices.py", "muon: flat keys are one part", "for part in _BETWEEN.split(str(entry))", "for part in [str(entry)]", "tests/optimizers/test_hidden_matrices.py"),
    Mutation("_optimizers/hidden_matrices.py", "muon: a count is a model", "        _check_parameters(arg, tree)\n", "", "tests/inputs/test_injected.py"),
    Mutation("_packed/deals.py", "muon: shares in the order of segments", "    def by_share(self, x: Any) -> Any:\n        \"\"\"The rows as they were before `by_segment`.\"\"\"\n        if self._is_plain:", "    def by_share(self, x: Any) -> Any:\n        \"\"\"The rows as they were before `by_segment`.\"\"\"\n        if True:", "tests/packed/test_deals.py"),
    Mutation("_packed/parts.py", "muon: a buffer cuts matrices", "if devices > 1 and (spec.deal is None or spec.deal.shares % devices):", "if False:", DEVICES + "/test_muon.py"),
    Mutation("_packed/seconds.py", "muon: second moments of matrices", "or (axes is not None and not per_output)", "or False", "tests/optimizers/test_muon.py"),
    Mutation("_packed/groups.py", "muon: an iteration for each leaf", "groups[kind].append(i)", "groups[(*kind, i)].append(i)", "tests/optimizers/test_muon_edges.py"),
    Mutation("_packed/layouts.py", "empty leaves in the order of the tree", "(pair[1].first, pair[1].num_blocks, pair[0])", "(pair[1].first, pair[0])", PACKED),
    Mutation("_packed/parts.py", "muon: matrices of shards are on each device", "return sharded_as(x, old.codes if is_blocks(old) else old)", "return x", DEVICES + "/test_packed.py"),
    Mutation("_packed/rows.py", "explicit axes of rows are left to JAX", "return on_automatic_axes(per_layer, everywhere, per_row)", "return per_layer(per_row)", DEVICES + "/test_packed.py"),
    Mutation("_layers/matrix_axes.py", "muon: silence inside shard_map", "if unknown := unknown_axes(x):", "if False and (unknown := unknown_axes(x)):", DEVICES + "/test_muon.py"),
    Mutation("_layers/replicas.py", "muon: pmap without a name", "if not str(name).startswith(_WITHOUT_NAME)", "if True", DEVICES + "/test_muon.py"),
    Mutation("_wrappers/schedule_free.py", "the weight of the rate before", "largest = jnp.maximum(rate, largest)", "largest = largest", "tests/wrappers/test_schedule_free.py"),
    Mutation("_wrappers/schedule_free.py", "weights overflow", "weight = jnp.clip(factors[0] * factors[1], 1 / _LARGEST, _LARGEST)", "weight = step**by_step * largest**by_rate", "tests/wrappers/test_schedule_free.py"),
    Mutation("_wrappers/schedule_free.py", "z of a leaf without a gradient is averaged", "steps = [None if g is None else u for u, g in pairs]", "steps = [u for u, g in pairs]", "tests/wrappers/test_schedule_free.py"),
    # ---- _ivy
    Mutation("_ivy/execution.py", "gradients stay in the returned value", "return ret if retain_grads else stop_gradient(ret), grads", "return ret, grads", "tests/ivy"),
    Mutation("_ivy/execution.py", "negative positions are not found", "-len(names) <= key < len(names)", "0 <= key < len(names)", "tests/ivy"),
    Mutation("_ivy/variables.py", "a value that the dtype cannot hold", "if _kind(b) > _kind(a):", "if False:", "tests/ivy"),
]  # fmt: skip
