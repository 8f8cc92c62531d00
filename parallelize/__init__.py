"""Functions that transform a plain single-device model for a mesh, and one file of tables per architecture."""
