"""titanlike: pretraining for Llama-family models. Write the model once, name a mesh, get the same run."""

__version__ = "0.1.0"
