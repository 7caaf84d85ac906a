"""A stand-in for Ray."""

from __future__ import annotations

import pickle
import types
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class FakeRay(types.ModuleType):
    """The calls of Ray that are used. Tasks run when their result is asked for, on copies, as on another machine.

    `deaths` tells how often the worker of each shard dies; `die` is what it does before.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.deaths: dict[str, int] = {}
        self.calls: list[Any] = []
        self.options: dict[str, Any] = {}
        self.connected = False
        self.die = lambda job, site: None
        self.run = lambda function, job, site: function(job, site)

    def is_initialized(self):
        return self.connected

    def init(self, **options):
        self.calls.append(("init", options["address"]))
        if options["address"] == "ray://nobody:1":
            raise ConnectionError("ray client connection timeout")
        self.connected = True

    def shutdown(self):
        self.calls.append("shutdown")
        self.connected = False

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, **options):
        self.options = options
        return lambda function: types.SimpleNamespace(remote=lambda *words: pickle.dumps((function, *words)))

    def get(self, ref):
        function, job, site = pickle.loads(ref)
        for _ in range(1 + self.options["max_retries"]):
            if not self.deaths.get(job.path.name):
                return pickle.loads(pickle.dumps(self.run(function, job, site)))
            self.deaths[job.path.name] -= 1
            self.die(job, site)
        raise RayError("The worker died unexpectedly.\n")

    def cancel(self, ref, *, force):
        assert force
        self.calls.append(("cancel", pickle.loads(ref)[1].path.name))

    def wait(self, refs, *, num_returns, timeout):
        assert len(refs) == num_returns
        self.calls.append("wait")
