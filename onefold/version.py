"""The version, on the ground floor: files name who wrote them."""

__version__ = "0.2.0"
