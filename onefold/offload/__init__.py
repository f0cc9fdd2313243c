"""Storage of model state on the device, in host memory and on disk, and the copies between them."""
