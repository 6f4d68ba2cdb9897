"""What a checker has to refuse: an error in each line that says so, and in no other."""

import jgrad

tx = jgrad.adam(1e-3)
jgrad.adam(1e-3, beta_1=0.9)  # error
jgrad.adam(1e-3, weight_decay_rule="coupled")  # error
jgrad.adam("1e-3")  # error
jgrad.adam(1e-3, beta1="x")  # error
jgrad.adam(1e-3, 0.9)  # error
jgrad.lars(1e-3, rule="papr")  # error
jgrad.accumulate(tx, "4")  # error
jgrad.muon(1e-3)  # error
jgrad.foo  # error
jgrad.unquantized  # error
jgrad.adamw(1e-3)  # error
