"""What is where on the site: the entries of its sidebar, and what some of them lead to."""

# The sidebar: at most 25 entries with the home page, so that it can be read at a glance.
CONTENTS = {
    "Start here": [
        "getting_started",
        "choose",
        "faq",
    ],
    "Guides": [
        "methods",
        "muon",
        "hyperparameters",
        "wrappers",
        "runs",
        "memory",
        "four_bytes",
        "larger_than_device",
        "scanned_layers",
        "packed",
        "devices",
        "trainers",
        "differentiate",
        "your_own",
    ],
    "Coming from": [
        "from_optax",
        "from_elsewhere",
        "contents/upgrade",
    ],
    "Examples and reference": [
        "gallery/index",
        "reference",
    ],
    "What is known": [
        "benchmarks",
        "contents/measurements",
    ],
    "Project": [
        "contents/project",
    ],
}

# Pages under one entry, which lists each with a sentence.
_MEASUREMENTS = {
    "results": "Every timing beside optax and PyTorch, with plots.",
    "notes/side_by_side": "What each method keeps, moves and sends, and how a small model trains.",
    "notes/steps": "How steps were timed, their targets, and what explains the figures.",
    "notes/accelerators": "What a step costs on a TPU and a GPU, counted in compiled programs.",
    "notes/peaks": "The peaks of train steps, and the largest model that fits one device.",
    "notes/host_memory": "How a model that does not fit begins, is saved and restored.",
    "notes/on_paper": "What fits on many chips, and what training sends between them.",
    "notes/what_wrappers_cost": "What clipping, skipping and accumulation add to a step.",
    "notes/eight_bits": "How moments in 8 bits are computed on each kind of machine.",
    "notes/losses": "What 8 bits and bfloat16 do to the test loss.",
    "notes/muon": "How fast Muon is, and where optax's differs.",
    "notes/variants": "The options that make each published variant of LARS, LAMB and Adam.",
    "notes/soap": "SOAP beside AdamW and Muon, on two equations and a small transformer.",
    "notes/wrappers_of_optax": "What corresponds to options and fields of optax's wrappers.",
    "notes/differentiate": "Which optimizers of optax have no derivative where gradients are zero.",
    "notes/large_batches": "Momentum, Adam, LARS and LAMB from batch 32 to the full batch.",
    "notes/lightbench": "Twenty small problems on which optimizers fail, after LightBench's.",
    "notes/endurance": "A long run of several processes that is killed and resumed.",
    "notes/pitfalls": "What goes wrong in optimizers elsewhere, and the test of each here.",
    "notes/tests_of_others": "Which tests of other libraries pass with jgrad in optax's place.",
}
MEASUREMENTS = {f"repository/benchmarks/{page}": text for page, text in _MEASUREMENTS.items()}
PROJECT = {
    "contents/cite": "How to cite jgrad, and where to ask.",
    "correctness": "What each rule is tested against, and how to check it.",
    "stability": "What stays the same until the next major version.",
    "repository/CHANGELOG": "What each version changed.",
    "repository/CONTRIBUTING": "How to add an optimizer, a wrapper, a test or a page.",
    "repository/BUILD_NOTES": "Why jgrad is built as it is, with what was measured.",
}
