"""Words that readers type into the search, and the public names or guides that they look for.

No name itself: the search finds names and parts of them already.
"""

NAMES = {
    "gradient_descent": ("sgd", "heavy ball", "momentum", "nesterov"),
    "adam": ("adamw", "cadamw", "cautious", "decoupled weight decay", "weight decay"),
    "lars": ("larc", "large batch"),
    "lamb": ("layerwise", "layer-wise", "layer wise"),
    "muon": ("normuon", "newton-schulz", "newton schulz", "spectral"),
    "hidden_matrices": ("muon matrices", "embedding", "embeddings"),
    "optimizer_of_leaf": ("custom optimizer", "own optimizer", "new optimizer"),
    "scale_by_trust_ratio": ("trust ratio", "rate per layer"),
    "clip_by_global_norm": (
        "clip",
        "clipping",
        "grad clip",
        "grad clipping",
        "gradient clipping",
        "clip_grad_norm",
        "clip_grad_norm_",
        "max_grad_norm",
    ),
    "average_params": (
        "ema",
        "polyak",
        "polyak averaging",
        "exponential moving average",
        "moving average",
        "swa",
    ),
    "by_path": (
        "param groups",
        "param_groups",
        "parameter groups",
        "per-parameter options",
        "multi_transform",
        "partition",
        "layer-wise learning rate",
        "freeze",
    ),
    "accumulate": (
        "gradient accumulation",
        "grad accumulation",
        "accumulation",
        "multisteps",
        "multi_steps",
        "microbatch",
        "micro-batches",
        "mini-batches",
    ),
    "skip_nonfinite": (
        "mixed precision",
        "fp16",
        "float16",
        "loss scale",
        "loss scaling",
        "loss_scale",
        "grad scaler",
        "gradscaler",
        "apply_if_finite",
        "nan",
        "inf",
    ),
    "skip_spikes": ("loss spike", "loss spikes", "spike", "divergence"),
    "master_weights": ("mixed precision", "bf16", "bfloat16", "fp32 copy", "amp"),
    "stochastic_rounding": ("bf16", "bfloat16"),
    "schedule_free": ("schedule-free", "schedulefree", "no schedule"),
    "hyperball": ("muonh", "adamh", "unit norm", "fixed norm"),
    "offload": ("cpu offload", "host memory", "pinned_host"),
    "pack_small": ("fuse", "flatten"),
    "pack": ("ravel", "ravel_pytree", "flatten", "foreach"),
    "zero": ("fsdp", "zero-1", "zero1", "zero redundancy", "sharded optimizer"),
    "watch": ("monitor", "logging", "gradient norm", "grad norm"),
    "report": ("metrics", "wandb", "tensorboard"),
    "step_in_backward": (
        "lomo",
        "gradient release",
        "fused backward",
        "optimizer in backward",
        "apply_optimizer_in_backward",
    ),
    "scan_layers": ("remat", "gradient checkpointing", "activation checkpointing", "nn.scan"),
    "leaf_programs": ("pallas", "kernel"),
    "orthogonalize": ("newton-schulz", "newton schulz", "polar", "msign"),
    "global_norm": ("grad norm", "gradient norm", "total_norm"),
    "state_shardings": ("fsdp", "sharding", "partition spec", "partitionspec"),
    "carry_over": ("convert", "migrate", "restore", "checkpoint", "resume"),
    "hvp": ("hessian", "hessian-vector product"),
    "jac": ("jacobian", "jacfwd", "jacrev"),
    "grad": ("autograd", "backward", "derivative"),
    "stop_gradient": ("detach", "no_grad"),
}

# By the names of their files, for what is an option of many functions.
GUIDES = {
    "memory": ("int8", "8bit", "8-bit", "8 bits", "quantized", "quantization", "low memory"),
    "scanned_layers": ("nnx.scan", "layer_stack", "filter_vmap", "scanned layers"),
    "four_bytes": ("peak memory", "out of memory", "oom"),
    "muon": ("muonclip", "muon clip", "qk-clip", "logit clipping", "dion", "dion2", "dion3"),
    "trainers": ("maxtext", "tunix", "levanter", "marin", "brax", "big_vision", "easylm", "gemma"),
    "larger_than_device": ("weight offload", "weights on the host", "larger than memory"),
    "devices": ("multi gpu", "multi-gpu", "data parallel", "distributed", "pmap", "shard_map"),
    "runs": ("checkpointing", "checkpoints"),
    "packed": ("fused",),
    "differentiate": ("maml", "meta-learning", "meta learning", "hypergradient", "unroll"),
    "from_optax": ("optax", "migrate from optax"),
    "from_elsewhere": ("pytorch", "torch", "torch.optim", "ivy"),
    "choose": ("which optimizer", "defaults", "hyperparameters", "learning rate"),
}

# Pairs of names that may share words: readers of one of them want to see the other.
RELATED = (
    {"skip_nonfinite", "master_weights"},  # float16 needs both
    {"master_weights", "stochastic_rounding"},  # each is for bfloat16
    {"zero", "state_shardings"},  # inside `shard_map`, and under `jit`
    {"muon", "orthogonalize"},
    {"pack", "pack_small"},
    {"watch", "global_norm"},
)
