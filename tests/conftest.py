"""One session of eight fake CPU devices, strict about what jax would let pass."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
