"""Find, override, check, print and compare configs."""

from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.files import load
from megajax.config.references import Builds

__all__ = ["Builds", "ConfigError", "Problem", "UserError", "load"]
