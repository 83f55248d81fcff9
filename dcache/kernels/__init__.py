"""Attention kernels for TPU (Pallas), behind the seam of `dcache.attention`, which says when they are used.

They return what eviction policies read beside the output: no kernel that ships with JAX returns column sums of the
attention. Everything that leaves a kernel is float32 except the output itself.
"""
