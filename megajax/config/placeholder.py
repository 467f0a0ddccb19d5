"""A placeholder for a missing or wrong value, so that the rest of a config can be built and checked."""

from typing import Any, NoReturn


class UnknownValue(Exception):
    """Use of a missing or wrong value, which is reported elsewhere."""


class Placeholder:
    """An unknown value: it can be stored and passed on; any other use raises UnknownValue."""

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise UnknownValue(name)

    def _unknown(self, *args: Any) -> NoReturn:
        raise UnknownValue

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __call__ = __hash__ = _unknown
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _unknown
    __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = __round__ = _unknown
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _unknown
    __setattr__ = __delattr__ = __enter__ = __exit__ = _unknown
