"""A submission to AlgoPerf, MLCommons' benchmark of training algorithms."""
