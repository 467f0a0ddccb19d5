"""Model families: functions that return the model config of a size."""
