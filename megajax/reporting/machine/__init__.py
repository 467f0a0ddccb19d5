"""Whether a machine is fit for training: what `megajax.doctor` checks."""
