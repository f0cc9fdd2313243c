"""Evaluation."""

from onefold.compat.lazy import names, same

__getattr__, __dir__ = names(__name__, same("onefold.compat.deepspeed.inference.engine", "InferenceEngine"))
