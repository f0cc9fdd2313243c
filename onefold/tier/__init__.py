"""Where bytes rest. Today the device alone; host and NVMe come behind one protocol: start_load, start_store, wait."""
