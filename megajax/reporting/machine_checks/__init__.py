"""The checks of `megajax.doctor`: whether a machine is fit for training."""
