"""Find, override, check, print and compare configs."""

from megajax.config.class_references import Builds
from megajax.config.config_files import load
from megajax.config.errors import ConfigError, Problem, UserError

__all__ = ["Builds", "ConfigError", "Problem", "UserError", "load"]
