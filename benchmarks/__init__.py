"""onefold beside its peers, on the same model, data and hyperparameters. `python -m benchmarks.compare` and `.gpu`."""
