"""The commands of `nm-sparsity`: one module each, with `add_arguments` and `run`."""
