"""Find, override, check, print and compare configs."""

from megajax.config.class_references import Builds
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.files import load

__all__ = ["Builds", "ConfigError", "Problem", "UserError", "load"]
