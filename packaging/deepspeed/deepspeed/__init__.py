"""onefold under the name of DeepSpeed. Every module is `onefold.compat.deepspeed`'s."""

from onefold.compat.as_deepspeed import answer_imports

answer_imports()
