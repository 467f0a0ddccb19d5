"""Model families: functions from a size to a model config."""
