"""DeepSpeed's public names over onefold's runtime.

The submodules have no files here: `onefold.compat.deepspeed_names` lists them with the origin of each name. Importing
one costs little, because names are fetched when they are read. Names for what is not ZeRO (pipelines, expert layers,
inference kernels, compression) can be imported, and raise when they are used.
"""

from __future__ import annotations

import sys

from onefold.compat import finder
from onefold.compat.as_deepspeed import VERSION as __version__

finder.install()
__getattr__, __dir__ = finder.lazy_names(sys.modules[__name__], "")
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split("+")[0].split("."))
HAS_TRITON = False
