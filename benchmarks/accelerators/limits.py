"""What the steps of `benchmarks/accelerators/recipes.py` may cost, compiled for an H100 and a TPU v5e.

`LIMITS` is what the library promises, and is never widened. `NOT_REACHED` has what holds where that
is not reached yet; once it is, a test asks to remove the entry. `KERNELS` are those of the day when
they were written; a tenth more is allowed.
"""

from typing import NamedTuple


class Limit(NamedTuple):
    """At most so much, per parameter.

    Attributes:
      bytes: of HBM read and written, without rare branches.
      temporaries: bytes.
    """

    bytes: float
    temporaries: float


# By recipe and target: on a tree, and packed where that is another limit; for every model.
LIMITS: dict[str, dict[str, tuple[Limit, ...]]] = {
    # Norms of gradients, updates and parameters, and updates that are written; a TPU copies weights.
    "watch(AdamW)": {"h100": (Limit(40.1, 8.1), Limit(44.2, 4.1)), "v5e": (Limit(48.2, 8.1),)},
    "watch(AdamW, every=100)": {"h100": (Limit(28, 4.1),), "v5e": (Limit(28.1, 4.7),)},
    "momentum": {"h100": (Limit(20, 0),), "v5e": (Limit(20, 0.2),)},
    "Lion": {"h100": (Limit(20, 0),), "v5e": (Limit(20, 0.2),)},
    "AdamW": {"h100": (Limit(28, 0),), "v5e": (Limit(28, 0.2),)},
    "AdamW, cautious": {"h100": (Limit(28.1, 0),), "v5e": (Limit(28.1, 0.2),)},
    # Weights, both moments and both averages are read and written, the gradient is read.
    "schedule_free(Adam)": {"h100": (Limit(44, 0),), "v5e": (Limit(44, 0.2),)},
    "clip + AdamW": {"h100": (Limit(32.3, 0.05),), "v5e": (Limit(32.3, 0.2),)},
    "skip(clip + AdamW)": {"h100": (Limit(32.3, 0.05),), "v5e": (Limit(32.3, 0.2),)},
    # Norms read moments that are chosen; chosen after the update, the step would be written as well.
    "skip(LAMB)": {"h100": (Limit(48.5, 0.2),), "v5e": (Limit(48.5, 0.7),)},
    "skip(optax's AdamW)": {"h100": (Limit(36, 0.2),), "v5e": (Limit(36, 0.2),)},
    "skip_spikes(skip(clip + AdamW))": {"h100": (Limit(32.3, 0.05),), "v5e": (Limit(32.3, 0.2),)},
    # The direction is written, for the sums and for the step. Packed, a GPU has a kernel for each sum.
    "hyperball(Adam)": {"h100": (Limit(44.1, 4.4), Limit(52.3, 4.1)), "v5e": (Limit(40.7, 4.7), Limit(40.4, 4.1))},
    "AdamW + ema": {"h100": (Limit(36, 0),), "v5e": (Limit(36, 0.2),)},
    "accumulate(clip + AdamW)": {"h100": (Limit(44.2, 1.9),), "v5e": (Limit(30, 4.6),)},
    "accumulate, emit=False": {"h100": (Limit(12.5, 0.1),), "v5e": (Limit(12.5, 0.1),)},
    # Squares are read for rows and for columns; the clip and the scale of weights wait for sums.
    "Adafactor": {"h100": (Limit(32.1, 0.4),), "v5e": (Limit(24, 0.7),)},
    "LARS": {"h100": (Limit(36, 0.2), Limit(28.5, 0.1)), "v5e": (Limit(32, 0.6), Limit(28.5, 0.1))},
    "LAMB": {"h100": (Limit(44.5, 0.2),), "v5e": (Limit(44.5, 0.7),)},
    "clip + LAMB": {"h100": (Limit(48.5, 0.2),), "v5e": (Limit(48.5, 0.7),)},
    "AdamW, 8 bits": {"h100": (Limit(23, 0.2),), "v5e": (Limit(17, 0.2),)},
    # The updates of a kernel are an array of their own, which is read again.
    "AdamW, 8 bits, optax.apply_updates": {"h100": (Limit(23, 0.2),), "v5e": (Limit(24.2, 1.8), Limit(24.2, 4.1))},
    "bf16: AdamW": {"h100": (Limit(22, 0),), "v5e": (Limit(22, 0.2),)},
    "bf16: master(AdamW)": {"h100": (Limit(30, 0),), "v5e": (Limit(30, 0.2),)},
    "bf16: stochastic(AdamW)": {"h100": (Limit(22.3, 0.05),), "v5e": (Limit(22.3, 0.2),)},
    "bf16: stochastic(AdamW, 8 bits)": {"h100": (Limit(16.5, 0.3),), "v5e": (Limit(12, 0.3),)},
    "bf16: stochastic(AdamW, 8 bits), optax.apply_updates": {"h100": (Limit(16.6, 0.3),),
     "v5e": (Limit(16.2, 0.9), Limit(16.2, 2.1))},
    "bf16: skip(stochastic(clip + AdamW, 8 bits))": {"h100": (Limit(20.5, 0.5),), "v5e": (Limit(16, 0.5),)},
    "bf16: skip(accumulate(master(clip + LAMB + ema)))": {"h100": (Limit(52, 6.1),), "v5e": (Limit(30, 6.1),)},
    # Twice the larger group, which has 0.8 of the parameters in float32; the squares of its matrices
    # are not in that. On a TPU a chunk of them is in VMEM. What the products of matrices read and
    # write depends on their kernels.
    "Muon": {"h100": (Limit(280, 6.4),), "v5e": (Limit(45, 3.3),)},
    "NorMuon": {"h100": (Limit(265, 7.3),), "v5e": (Limit(53, 3.3),)},
    # The branch with new bases has all averages, all bases and all new bases as stacks.
    "SOAP": {"h100": (Limit(208, 40.1),)},
    "hyperball(Muon)": {"h100": (Limit(275, 8.1),), "v5e": (Limit(58, 7.3),)},
}  # fmt: skip


def limit(recipe: str, target: str, *, packed: bool) -> Limit:
    """Of a recipe on a target."""
    found = LIMITS[recipe][target]
    return found[-1 if packed else 0]


# By recipe, target, model and form.
NOT_REACHED: dict[tuple[str, str, str, str], Limit] = {
    ("accumulate, emit=False", "v5e", "large", "tree"): Limit(16, 0),
    ("accumulate, emit=False", "v5e", "large", "packed"): Limit(16, 0),
    ("accumulate, emit=False", "v5e", "stacked", "tree"): Limit(15.4, 0.02),
    ("accumulate, emit=False", "v5e", "stacked", "packed"): Limit(16, 0),
    ("accumulate, emit=False", "h100", "large", "tree"): Limit(16, 0),
    ("accumulate, emit=False", "h100", "large", "packed"): Limit(16, 0),
    ("accumulate, emit=False", "h100", "stacked", "tree"): Limit(16, 0),
    ("accumulate, emit=False", "h100", "stacked", "packed"): Limit(16, 0),
    # 16 bytes are copies, whose cause is not known.
    ("hyperball(Adam)", "h100", "medium", "tree"): Limit(56, 4.4),
    # Two copies of a group and its squares: 2.25 times 3.2 bytes.
    ("Muon", "h100", "two shapes", "tree"): Limit(249.6, 7.2),
    ("accumulate, emit=False", "v5e", "medium", "tree"): Limit(13.7, 0.28),
    ("accumulate, emit=False", "v5e", "medium", "packed"): Limit(16, 0),
    ("accumulate, emit=False", "h100", "medium", "tree"): Limit(16, 0),
    ("accumulate, emit=False", "h100", "medium", "packed"): Limit(16, 0),
}

# Three for each of five iterations of a chunk: one for each of two shapes, and on a TPU two and six.
PRODUCTS = {
    (name, target): 15 * chunks
    for name in ("Muon", "NorMuon", "hyperball(Muon)")
    for target, chunks in {"h100": 2, "v5e": 8}.items()
} | {("SOAP", "h100"): 144}  # six of each matrix, and in its branch a power step has two

# Kernels of a step, by recipe and target: of each model in each form of the recipe.
KERNELS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("watch(AdamW)", "v5e"): {"medium": (126, 37), "large": (49, 34), "stacked": (146, 36)},
    ("watch(AdamW)", "h100"): {"medium": (160, 23), "large": (48, 20), "stacked": (89, 30)},
    ("watch(AdamW, every=100)", "v5e"): {"medium": (25, 2), "large": (7, 2), "stacked": (53, 2)},
    ("watch(AdamW, every=100)", "h100"): {"medium": (29, 6), "large": (11, 6), "stacked": (60, 6)},
    ("momentum", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("momentum", "h100"): {"medium": (26, 3), "large": (8, 3), "stacked": (18, 3)},
    ("Lion", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("Lion", "h100"): {"medium": (26, 3), "large": (8, 3), "stacked": (18, 3)},
    ("Adafactor", "v5e"): {"medium": (387,), "large": (101,), "stacked": (186,)},
    ("Adafactor", "h100"): {"medium": (262,), "large": (76,), "stacked": (84,)},
    ("SOAP", "h100"): {"squares": (439,)},
    ("AdamW", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("AdamW", "h100"): {"medium": (27, 4), "large": (9, 4), "stacked": (19, 4)},
    ("AdamW, cautious", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("AdamW, cautious", "h100"): {"medium": (27, 4), "large": (9, 4), "stacked": (19, 4)},
    ("schedule_free(Adam)", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("schedule_free(Adam)", "h100"): {"medium": (29, 6), "large": (11, 6), "stacked": (21, 6)},
    ("clip + AdamW", "v5e"): {"medium": (59, 13), "large": (23, 13), "stacked": (43, 13)},
    ("clip + AdamW", "h100"): {"medium": (81, 11), "large": (27, 12), "stacked": (44, 11)},
    ("skip(clip + AdamW)", "v5e"): {"medium": (59, 13), "large": (23, 13), "stacked": (43, 13)},
    ("skip(clip + AdamW)", "h100"): {"medium": (84, 14), "large": (30, 15), "stacked": (47, 14)},
    ("skip(LAMB)", "v5e"): {"large": (50,)},
    ("skip(LAMB)", "h100"): {"large": (51,)},
    ("skip(optax's AdamW)", "v5e"): {"large": (17,)},
    ("skip(optax's AdamW)", "h100"): {"large": (27,)},
    # Seven to eight kernels more on a GPU, and 17 on a TPU, of vectors of the window.
    ("skip_spikes(skip(clip + AdamW))", "v5e"): {"medium": (76, 30), "large": (40, 30), "stacked": (60, 30)},
    ("skip_spikes(skip(clip + AdamW))", "h100"): {"medium": (91, 22), "large": (38, 23), "stacked": (54, 22)},
    ("hyperball(Adam)", "v5e"): {"medium": (427, 51), "large": (111, 27), "stacked": (102, 35)},
    ("hyperball(Adam)", "h100"): {"medium": (202, 21), "large": (59, 23), "stacked": (62, 21)},
    ("AdamW + ema", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("AdamW + ema", "h100"): {"medium": (28, 5), "large": (10, 5), "stacked": (20, 5)},
    ("accumulate(clip + AdamW)", "v5e"): {"medium": (55, 4), "large": (19, 4), "stacked": (39, 4)},
    ("accumulate(clip + AdamW)", "h100"): {"medium": (80, 9), "large": (26, 10), "stacked": (43, 9)},
    ("accumulate, emit=False", "v5e"): {"medium": (53, 2), "large": (17, 2), "stacked": (37, 2)},
    ("accumulate, emit=False", "h100"): {"medium": (77, 6), "large": (23, 7), "stacked": (40, 6)},
    ("LARS", "v5e"): {"medium": (240, 16), "large": (64, 13), "stacked": (75, 18)},
    ("LARS", "h100"): {"medium": (118, 11), "large": (41, 13), "stacked": (45, 11)},
    ("LAMB", "v5e"): {"medium": (141, 12), "large": (39, 11), "stacked": (67, 13)},
    ("LAMB", "h100"): {"medium": (95, 13), "large": (34, 13), "stacked": (42, 13)},
    ("clip + LAMB", "v5e"): {"medium": (192, 24), "large": (61, 23), "stacked": (94, 25)},
    ("clip + LAMB", "h100"): {"medium": (149, 20), "large": (52, 21), "stacked": (67, 20)},
    ("AdamW, 8 bits", "v5e"): {"medium": (100, 5), "large": (27, 5), "stacked": (32, 5)},
    ("AdamW, 8 bits", "h100"): {"medium": (100, 11), "large": (46, 11), "stacked": (41, 11)},
    ("AdamW, 8 bits, optax.apply_updates", "v5e"): {"large": (33, 6), "stacked": (36, 6), "medium": (124, 6)},
    ("AdamW, 8 bits, optax.apply_updates", "h100"): {"large": (46, 11), "stacked": (41, 11), "medium": (100, 11)},
    ("bf16: AdamW", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("bf16: AdamW", "h100"): {"medium": (27, 4), "large": (9, 4), "stacked": (19, 4)},
    ("bf16: master(AdamW)", "v5e"): {"medium": (24, 1), "large": (6, 1), "stacked": (16, 1)},
    ("bf16: master(AdamW)", "h100"): {"medium": (27, 4), "large": (9, 4), "stacked": (19, 4)},
    ("bf16: stochastic(AdamW)", "v5e"): {"medium": (40, 4), "large": (12, 4), "stacked": (39, 4)},
    ("bf16: stochastic(AdamW)", "h100"): {"medium": (8, 7), "large": (16, 7), "stacked": (23, 7)},
    ("bf16: stochastic(AdamW, 8 bits)", "v5e"): {"medium": (175, 8), "large": (47, 8), "stacked": (58, 8)},
    ("bf16: stochastic(AdamW, 8 bits)", "h100"): {"medium": (130, 14), "large": (55, 14), "stacked": (52, 14)},
    ("bf16: stochastic(AdamW, 8 bits), optax.apply_updates", "v5e"): {"large": (53, 9), "stacked": (62, 9),
     "medium": (199, 9)},
    ("bf16: stochastic(AdamW, 8 bits), optax.apply_updates", "h100"): {"large": (55, 14), "stacked": (50, 14),
     "medium": (131, 14)},
    ("bf16: skip(stochastic(clip + AdamW, 8 bits))", "v5e"): {"medium": (241, 22), "large": (77, 22),
     "stacked": (108, 22)},
    ("bf16: skip(stochastic(clip + AdamW, 8 bits))", "h100"): {"medium": (236, 26), "large": (88, 28),
     "stacked": (81, 26)},
    ("bf16: skip(accumulate(master(clip + LAMB + ema)))", "v5e"): {"medium": (79, 5), "large": (25, 5),
     "stacked": (55, 5)},
    ("bf16: skip(accumulate(master(clip + LAMB + ema)))", "h100"): {"medium": (82, 11), "large": (28, 12),
     "stacked": (45, 11)},
    ("Muon", "v5e"): {"two shapes": (320,)},
    ("Muon", "h100"): {"two shapes": (132,)},
    ("NorMuon", "v5e"): {"two shapes": (674,)},
    ("NorMuon", "h100"): {"two shapes": (235,)},
    ("hyperball(Muon)", "v5e"): {"two shapes": (717,)},
    ("hyperball(Muon)", "h100"): {"two shapes": (255,)},
}  # fmt: skip

# Collectives of a step whose leaves are sharded under `jit`, those of rare branches too.
_NONE: dict[str, int] = {}
_NORM = {"all-reduce": 2}  # one in the branch that repeats the norm rescaled
_NORMS = {"all-reduce": 4}
COLLECTIVES: dict[str, dict[str, int]] = {
    "momentum": _NONE,
    "Lion": _NONE,
    "AdamW": _NONE,
    "watch(AdamW)": {"all-reduce": 4},
    "watch(AdamW, every=100)": {"all-reduce": 4},  # in the rare branch
    "AdamW, cautious": _NONE,
    "schedule_free(Adam)": _NONE,
    "clip + AdamW": _NORM,
    "skip(clip + AdamW)": _NORM,
    # One more for whether the gradients are finite.
    "skip(LAMB)": {"all-reduce": _NORMS["all-reduce"] + 1},
    "skip(optax's AdamW)": {"all-reduce": 1},
    "skip_spikes(skip(clip + AdamW))": _NORM,
    "hyperball(Adam)": {"all-reduce": 3},
    "AdamW + ema": _NONE,
    "accumulate(clip + AdamW)": {"all-reduce": 3},
    "accumulate, emit=False": {"all-reduce": 1},
    # Sums of rows, of columns, and of the mean of rows; norms of updates and of weights together.
    "Adafactor": {"all-reduce": 5},
    "LARS": _NORMS,
    "LAMB": _NORMS,
    "clip + LAMB": _NORMS,
    "AdamW, 8 bits": _NONE,
    "AdamW, 8 bits, optax.apply_updates": _NONE,
    "bf16: AdamW": _NONE,
    "bf16: master(AdamW)": _NONE,
    "bf16: stochastic(AdamW)": _NONE,
    "bf16: stochastic(AdamW, 8 bits)": _NONE,
    "bf16: stochastic(AdamW, 8 bits), optax.apply_updates": _NONE,
    # One more for whether the gradients are finite.
    "bf16: skip(stochastic(clip + AdamW, 8 bits))": {"all-reduce": 3},
    "bf16: skip(accumulate(master(clip + LAMB + ema)))": {"all-reduce": 5},
    # Two ways for each of three shapes; of experts, for rows and for columns apart.
    "Muon": {"all-to-all": 8},
    # Of the mean squares of outputs, and of sums over sharded matrices.
    "NorMuon": {"all-reduce": 3, "all-to-all": 8},
    "hyperball(Muon)": {"all-reduce": 3, "all-to-all": 8},
}
# What holds where that is not reached yet, by recipe and arrangement.
COLLECTIVES_NOW: dict[tuple[str, str], dict[str, int]] = {}
