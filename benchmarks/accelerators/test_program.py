"""The instrument beside what is known: programs whose bytes, kernels and collectives are counted by hand."""

import platform
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding, PartitionSpec as P

from benchmarks.accelerators import program
from benchmarks.accelerators.program import Program
from benchmarks.accelerators.targets import TARGETS, missing
from tests.support.choice import mostly_slow

pytestmark = pytest.mark.accelerators

every_target = pytest.mark.parametrize("target", mostly_slow(TARGETS, "v5e", "h100"), indirect=True)
tpus = pytest.mark.parametrize("target", mostly_slow(["v5e", "v6e", "v5p"], "v5e"), indirect=True)

ARRAY = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)  # larger than the VMEM of any TPU
PART = jax.ShapeDtypeStruct((256, 4096), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def counted(target, f, *arrays, **options):
    return Program(target, f, program.on_one_device(target, arrays), **options).counts


@pytest.mark.parametrize("name", TARGETS)
def test_compilers_are_installed(name):
    """On other machines than these the packages are not there, and tests are skipped by name."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("libtpu and jax-cuda12-plugin are for Linux on x86-64")
    assert missing(TARGETS[name]) is None


@every_target
def test_a_copy_is_eight_bytes(target):
    counts = counted(target, jnp.negative, ARRAY)
    assert counts.bytes == 8 * ARRAY.size
    assert counts.kernels == 1
    assert counts.temporaries == counts.rare == counts.copied == 0
    assert counts.arguments == 4 * ARRAY.size


@every_target
def test_a_transposition_is_a_copy(target):
    counts = counted(target, jnp.transpose, ARRAY)
    assert counts.copied == counts.bytes == 8 * ARRAY.size


def adam(w, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w - 0.001 * m / (jnp.sqrt(v) + 1e-8), m, v


@every_target
def test_fused_adam_is_28_bytes_and_a_donated_one_has_no_temporaries(target):
    counts = counted(target, adam, ARRAY, ARRAY, ARRAY, ARRAY, donate=(0, 1, 2))
    assert counts.bytes == 28 * ARRAY.size
    assert counts.kernels == 1
    assert counts.temporaries < 100  # GPUs keep a pointer for each result


@every_target
def test_a_gradient_that_is_not_fused_is_written_and_read(target):
    """Behind a barrier: 12 bytes more for the mean of two, and 4 bytes of temporaries."""

    def two(w, m, v, g, h):
        return adam(w, m, v, jax.lax.optimization_barrier((g + h) / 2))

    counts = counted(target, two, *[ARRAY] * 5, donate=(0, 1, 2))
    assert counts.bytes == 40 * ARRAY.size
    assert counts.kernels == 2
    assert counts.temporaries == pytest.approx(4 * ARRAY.size, rel=0.01)


@every_target
def test_a_part_is_read_and_an_update_in_place_is_the_part(target):
    cut = counted(
        target, lambda x, at: jax.lax.dynamic_slice(x, (at, 0), PART.shape) * 2, ARRAY, SCALAR
    )
    assert cut.bytes == pytest.approx(8 * PART.size, abs=100)
    put = lambda x, y, at: jax.lax.dynamic_update_slice(x, y * 2, (at, 0))
    counts = counted(target, put, ARRAY, PART, SCALAR, donate=(0,))
    assert counts.bytes == pytest.approx(8 * PART.size, abs=100)
    assert counts.temporaries == 0


@every_target
def test_a_loop_is_as_many_passes_as_it_has_turns(target):
    body = lambda i, x: jnp.sin(x) + i.astype(jnp.float32)
    counts = counted(target, lambda x: jax.lax.fori_loop(0, 7, body, x), ARRAY, donate=(0,))
    assert counts.bytes == pytest.approx(7 * 8 * ARRAY.size, abs=1000)


@every_target
def test_the_dearest_branch_is_rare(target):
    """A loop: small branches become choices of elements on GPUs."""
    turn = lambda i, x: jnp.sin(x) + i.astype(jnp.float32)
    dear = lambda x: jax.lax.fori_loop(0, 7, turn, x)
    f = lambda which, x: jax.lax.cond(which > 0, dear, jnp.negative, x)
    # What a loop changes is copied before: on TPUs arguments that are kept, on GPUs donated ones.
    donate = (1,) if target.platform == "tpu" else ()
    counts = counted(target, f, SCALAR, ARRAY, donate=donate)
    assert counts.bytes == pytest.approx(8 * ARRAY.size, abs=1000)
    assert counts.rare == pytest.approx(6 * 8 * ARRAY.size, rel=0.2)


@every_target
def test_products(target):
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    three = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ x, x)
    assert counted(target, three, x).products == 3


@every_target
def test_a_sum_over_devices_is_one_all_reduce(target):
    topology = target.topology if target.platform == "tpu" else "1x1x4"
    mesh = program.mesh(target, topology, data=4)
    sharding = NamedSharding(mesh, P("data"))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32, sharding=sharding)
    assert Program(target, total, (x,)).counts.collectives == {"all-reduce": 1}


@tpus
def test_a_kernel_of_pallas_in_place(target):
    def kernel(x, y, out):
        out[...] = x[...] + y[...]

    block = pl.BlockSpec((256, 512), lambda i, j: (i, j))
    add = pl.pallas_call(
        kernel,
        out_shape=ARRAY,
        grid=(32, 8),
        in_specs=[block, block],
        out_specs=block,
        input_output_aliases={0: 0},
    )
    counts = counted(target, add, ARRAY, ARRAY, donate=(0,))
    assert counts.bytes == 12 * ARRAY.size
    assert counts.kernels == 1
    assert counts.temporaries == 0


@every_target
def test_optax_is_what_it_was(target):
    """Twelve leaves of Adam by optax: a kernel for each, and 28 bytes."""
    params = {str(i): jax.ShapeDtypeStruct((2048, 1024), jnp.float32) for i in range(12)}
    counts = program.step_counts(target, optax.adam(1e-3), params)
    size = sum(x.size for x in params.values())
    assert counts.bytes == pytest.approx(28 * size, rel=0.001)
    assert 12 <= counts.kernels <= 16
    assert counts.temporaries < 0.01 * size


def test_a_topology_that_its_compiler_does_not_know():
    target = TARGETS["v5e"]
    if reason := missing(target):
        pytest.skip(reason)
    reason = missing(target, "v5e:three")
    assert reason.startswith("TPU v5e: its compiler does not know v5e:three (")
    assert "\n" not in reason


def test_a_package_that_is_missing():
    target = TARGETS["v5e"]._replace(package="libtpu_of_nobody")
    assert missing(target) == (
        'TPU v5e: no compiler (libtpu_of_nobody); pip install ".[accelerators]", on Linux on x86-64'
    )
