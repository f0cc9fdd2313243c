"""`python -m deepspeed.utils.zero_to_torch`: zero_to_fp32 with a dtype to choose."""

from functools import partial

from onefold.compat.zero_to_fp32 import EXPORT_DTYPES
from onefold.utils import zero_to_fp32

main = partial(zero_to_fp32.main, prog="zero_to_torch.py", dtypes=EXPORT_DTYPES)

if __name__ == "__main__":
    main()
