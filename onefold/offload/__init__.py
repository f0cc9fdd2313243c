"""Where bytes rest: on the device, in host memory, in files; and the bus between them."""
