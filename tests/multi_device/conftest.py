"""Programs for eight devices take seconds to compile: most tests here are slow.

By default there is a test of each thing that `jgrad` does on many devices.
"""

import pathlib

import pytest

# With brackets, one choice of parameters; without, each of them.
QUICK = {
    "test_checkpoints.py": [],  # of an example
    "test_collectives.py": [
        "test_at_most[lars-mixed]",
        "test_at_most[lars-mixed-untyped]",
        "test_at_most[lamb-layers]",
        "test_at_most_as_many_as_optax[lars-packed]",
        "test_at_most_as_many_as_optax[clip-packed]",
    ],
    "test_data_parallel.py": [],
    "test_eight_bits.py": [
        "test_e41_explicit_axes[several rows]",
    ],
    "test_in_shard_map.py": [
        "test_results_vary_as_what_they_replace",
        "test_a_new_state_fits_the_carry[stacks]",
        "test_a_rate_of_each_device",
        "test_a_weight_of_each_device[2]",
    ],
    "test_layers.py": [
        "test_e12_cut_leaves_as_whole_ones[2-D-lamb-True]",
        "test_e12_scales_in_one_shard[True-1.0-1e+25-lamb]",
        "test_e12_nan_on_one_device[skip_nonfinite-adam-False-False]",
        "test_e12_one_name_beside_copies",
        "test_e12_constants_are_shards_where_a_tree_says_it",
        "test_e12_clip_asks_types_of_parameters",
        "test_e12_asking_types_writes_nothing",
        "test_e12_one_condition_where_leaves_vary_alike",
        "test_e12_a_constant_gradient_under_vmap",
        "test_e12_replicas_beside_experts",
    ],
    "test_muon.py": [
        "test_pmap_without_a_spec",
        "test_replicated_parameters_need_no_spec",
        "test_buffers_that_would_cut_a_matrix",
        "test_bytes_of_each_device",
        "test_a_device_has_no_matrix_more_than_it_must",
        "test_messages_of_mesh_axes",
        "test_no_mesh[muon]",
        "test_in_shard_map[muon-True-blocks, columns]",
        "test_under_jit[muon-known-blocks, three]",
    ],
    "test_packed.py": [
        "test_layers_on_explicit_axes",
        "test_matrices_on_explicit_axes",
    ],
    "test_placement.py": [
        "test_e25_mean_on_one_side[shard_map]",
        "test_e26_state_follows_parameters[eager-AxisType.Explicit-adamw]",
        "test_e26_state_follows_parameters[jit with out_shardings-AxisType.Auto-momentum]",
        "test_e26_state_follows_parameters[eager-AxisType.Auto-accumulate]",
        "test_types_of_new_arrays[adamw-tree]",
        "test_types_of_new_arrays[accumulate-packed]",
        "test_types_of_new_arrays[8 bits-tree]",
        "test_e26_state_shardings_without_arrays",
        "test_e26_state_shardings_of_masked",
        "test_e26_state_shardings_beside_none",
        "test_e26_state_shardings_errors",
        "test_e26_state_shardings_that_do_not_fit",
    ],
    "test_recipes.py": [],
    "test_state_shardings.py": [
        "test_names_of_users",
        "test_specs",
        "test_several_axes",
        "test_rows_of_buffers",
        "test_numbers",
        "test_an_axis_that_is_not_there",
    ],
    "test_traffic.py": [
        "test_by_hand",
        "test_table",
        "test_forms_of_a_program",
    ],
    "test_zero.py": [
        "test_every_optimizer[adamw]",
        "test_a_step_that_is_not_finite_on_one_device_is_skipped_on_all",
        "test_an_axis_of_several_that_is_not_there",
        "test_message",
    ],
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks as slow all that are not in `QUICK`, where each file and test must be."""
    here = pathlib.Path(__file__).parent
    names = {}
    for item in items:
        if item.path.parent == here:
            found = {item.name, item.name.partition("[")[0]}
            names.setdefault(item.path.name, set()).update(found)
            if found.isdisjoint(QUICK[item.path.name]):
                item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):  # whole files
        unknown = [f"{f}::{x}" for f in names for x in QUICK[f] if x not in names[f]]
        assert not unknown, f"tests/multi_device/conftest.py: no such tests: {unknown}"
