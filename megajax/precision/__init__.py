"""Dtypes for computation and storage: casts, loss scaling, fp8 matmuls and quantized weights."""
