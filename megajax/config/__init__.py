"""How configs are found, overridden, checked, printed and compared: the mechanism, no settings of its own."""

from megajax.config.builds import Builds
from megajax.config.errors import ConfigError, Problem, UserError
from megajax.config.files import load

__all__ = ["Builds", "ConfigError", "Problem", "UserError", "load"]
