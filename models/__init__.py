"""Plain single-device models. Nothing in this package knows that distribution exists; it imports torch alone."""
