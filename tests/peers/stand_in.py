"""Make timm and open_clip importable without torchvision, whose functions no test here uses."""

import importlib.machinery
import sys
import types


class Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(types.ModuleType):
    """A module that has every attribute."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **options: None})


class Finder:
    """A finder that returns a stand-in for torchvision and all its modules."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
