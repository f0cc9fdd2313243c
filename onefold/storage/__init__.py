"""Files on local file systems and objects in object stores, behind the same operations."""
