"""Reading and conversion of DeepSpeed checkpoints."""
