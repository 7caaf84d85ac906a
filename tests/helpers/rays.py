"""Stand-ins for Ray: one that runs tasks, and one that runs actors."""

from __future__ import annotations

import contextlib
import pickle
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class ObjectLostError(RayError):
    pass


class RuntimeEnvSetupError(RayError):
    pass


class ActorUnschedulableError(RayError):
    pass


class FakeRay(types.ModuleType):
    """The calls of Ray that packing uses. A task runs when its result is requested, on copies, as on another machine.

    `deaths` has how many times the worker of each shard dies; `die` is called before each death.
    """

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
        self.deaths: dict[str, int] = {}
        self.calls: list[Any] = []
        self.options: dict[str, Any] = {}
        self.connected = False
        self.die = lambda job, *words: None
        self.run = lambda function, *words: function(*words)

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

    def get_runtime_context(self):
        number = sum(isinstance(call, tuple) and call[0] == "init" for call in self.calls)
        return types.SimpleNamespace(get_job_id=lambda: f"job{number}")

    def cluster_resources(self):
        return {"CPU": 2.0}

    def remote(self, **options):
        self.options = options
        return lambda function: types.SimpleNamespace(remote=lambda *words: pickle.dumps((function, *words)))

    def get(self, ref):
        function, job, *words = pickle.loads(ref)
        for _ in range(1 + self.options["max_retries"]):
            if not self.deaths.get(job.name):
                return pickle.loads(pickle.dumps(self.run(function, job, *words)))
            self.deaths[job.name] -= 1
            self.die(job, *words)
        raise RayError("The worker died unexpectedly.\n")

    def cancel(self, ref, *, force):
        assert force
        self.calls.append(("cancel", pickle.loads(ref)[1].name))

    def wait(self, refs, *, num_returns, timeout):
        assert len(refs) == num_returns
        self.calls.append("wait")


class FakeCluster(types.ModuleType):
    """The calls of Ray that a loader uses. Actors are threads of this process. Values are copied, as on another
    machine, and the arrays in a result are read-only.

    Attributes:
        num_cpus: CPUs of the cluster. Actors without a CPU wait.
        living: The actors that have not ended.
        before: Called with an actor and the name of a method before the method runs. A RayError that it raises ends the
            actor, except for `ObjectLostError` and `RayTaskError`.
    """

    def __init__(self, num_cpus: int = 64) -> None:
        super().__init__("ray")
        kinds = (RayError, RayTaskError, ObjectLostError, RuntimeEnvSetupError, ActorUnschedulableError)
        self.exceptions = types.SimpleNamespace(**{kind.__name__: kind for kind in kinds})
        self.num_cpus = num_cpus
        self.store_bytes = 1 << 30
        self.living: list[FakeActor] = []
        self.pools: list[ThreadPoolExecutor] = []
        self.num_started = 0
        self.calls: list[Any] = []
        self.connected = False
        self.before: Callable[[FakeActor, str], None] = lambda actor, method: None
        self.options: dict[str, Any] = {}

    def is_initialized(self):
        return self.connected

    def init(self, **options):
        self.calls.append(("init", options["address"]))
        if options["address"] in {"auto", "ray://nobody:1"}:
            raise ConnectionError("Could not find any running Ray instance.")
        self.connected = True

    def shutdown(self):
        for actor in [*self.living]:
            actor.end()
        self.calls.append("shutdown")
        self.connected = False

    def nodes(self):
        return [{"Alive": True, "Resources": {"object_store_memory": self.store_bytes}}]

    def cluster_resources(self):
        return {"CPU": float(self.num_cpus)}

    def available_resources(self):
        return {"CPU": float(self.num_cpus - len([actor for actor in self.living if actor.has_cpu]))}

    def get_runtime_context(self):
        number = getattr(_RUNNING, "number", 0)
        job = sum(isinstance(call, tuple) and call[0] == "init" for call in self.calls)
        return types.SimpleNamespace(get_node_id=lambda: f"node{number:04d}", get_job_id=lambda: f"job{job}")

    def put(self, value):
        return value

    def remote(self, **options):
        self.options = options
        return lambda kind: types.SimpleNamespace(remote=lambda: FakeActor(self, kind))

    def kill(self, actor):
        actor.end()


_RUNNING = threading.local()


class FakeActor:
    """A handle and its actor, which runs `max_concurrency` calls at a time."""

    def __init__(self, cluster: FakeCluster, kind: Any) -> None:
        self.cluster, self.kind = cluster, kind
        self.number, cluster.num_started = cluster.num_started, cluster.num_started + 1
        self.has_cpu = cluster.available_resources()["CPU"] >= 1
        self.pool = ThreadPoolExecutor(cluster.options["max_concurrency"])
        cluster.pools.append(self.pool)
        self.lock = threading.Lock()
        self.pending: set[Future[Any]] | None = set()
        self.actor = pickle.loads(pickle.dumps(kind))()
        cluster.living.append(self)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return types.SimpleNamespace(remote=lambda *given: self.call(method, pickle.dumps(given)))

    def call(self, method: str, given: bytes) -> Any:
        if not self.cluster.connected:  # as Ray, in the thread that calls
            raise Exception("Failed to submit task to actor.\nCan't find actor.")  # noqa: TRY002
        future: Future[Any] = Future()
        with self.lock:
            if self.pending is None:
                future.set_exception(ActorDiedError("The actor is dead."))
            else:
                self.pending.add(future)
                if self.has_cpu and method != "live":  # `live` ends with the actor
                    self.pool.submit(self.run, future, method, given)
        return types.SimpleNamespace(future=lambda: future)

    def run(self, future: Future[Any], method: str, given: bytes) -> None:
        _RUNNING.number = self.number
        try:
            self.cluster.before(self, method)
            value = getattr(self.actor, method)(*pickle.loads(given))
            buffers: list[pickle.PickleBuffer] = []
            pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            copies = [bytes(buffer.raw()) for buffer in buffers]
            del value, buffers
            outcome = pickle.loads(pickled, buffers=copies)
        except ObjectLostError as err:
            self.settle(future, error=err)
        except RayTaskError as err:
            self.settle(future, error=err)
        except RayError:
            self.end()
        except Exception as err:  # noqa: BLE001
            self.settle(future, error=RayTaskError(repr(err)))
        else:
            self.settle(future, outcome)

    def settle(self, future: Future[Any], value: Any = None, error: Exception | None = None) -> None:
        with self.lock:
            if self.pending is None:  # the actor has ended meanwhile
                return
            self.pending.discard(future)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def end(self) -> None:
        with self.lock:
            lost, self.pending = self.pending, None
        with contextlib.suppress(ValueError):  # another thread has ended it
            self.cluster.living.remove(self)
        for future in lost or ():
            future.set_exception(ActorDiedError("The actor died unexpectedly."))
        self.pool.shutdown(wait=False)
