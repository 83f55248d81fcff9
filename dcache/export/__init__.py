"""Trained policies for other software: files that need no JAX, and a press that runs them in PyTorch."""
